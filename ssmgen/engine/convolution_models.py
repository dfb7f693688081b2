"""The problems of models with short convolutions, for prompts and for decoding."""

from __future__ import annotations

from typing import Any

from ..select.models import Ask, Client, Model, Wanted


class ConvolutionAsk(Ask):
    """Base class for the problems that models have for a short convolution."""

    options = frozenset(("pools", "tokens"))

    def used_by(self, model: Model) -> bool:
        return model.conv_channels > 0

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is not Client.MAMBA_SSM or model.kind in ("mamba1", "mamba2")

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} has no short convolution"

    def same(self, model: Model, wanted: Wanted) -> dict[str, Any]:
        """Fields that all its problems share."""
        return {"width": model.conv_width, "x": wanted.io, "weight": wanted.io, "bias": wanted.io if model.conv_bias else None}
