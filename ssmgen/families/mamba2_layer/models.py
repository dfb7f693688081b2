"""The decode layer kernels that Mamba-2 models need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...engine.layers.models import LayerAsk
from ...engine.window import StateLayout
from ...select.models import Model, Wanted
from ...spec.kernel import Index
from .spec import OPERATOR, Mamba2LayerProblem


class Mamba2LayerAsk(LayerAsk):
    """A decode step. Without slots, also the form of transformers' modules: with the logarithm of A in the dtype of activations, and a
    window that also holds the oldest input, which the convolution no longer reads."""

    def one_token(self, model: Model, wanted: Wanted) -> list[Any]:
        found = super().one_token(model, wanted)
        theirs = [p for p in found if p.index is Index.NONE and (p.conv.layout, p.conv.len) == (StateLayout.RUNS, model.conv_width)]
        return (found if wanted.by() else []) + [replace(p, A=wanted.io, A_is_log=True) for p in theirs]


ASKS = {OPERATOR: Mamba2LayerAsk(OPERATOR, "mamba2", Mamba2LayerProblem)}
