"""The axes of mamba3_chunk_scan's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.chunks.operands import rule_of
from .operands import OPERANDS, POOLS

_ASKED = dict.fromkeys(POOLS, "return_final_states")


def _of_tokens(given: Mapping[str, Any]) -> dict[str, str]:
    """The axes of a batch, or of packed tokens: with three axes B is packed or SISO, and angle is packed or the same for all heads."""
    return OPERANDS.axes(("token",) if getattr(given.get("x"), "ndim", 4) == 3 else ("batch token",))


RULES = {"mamba3_chunk_scan": rule_of(OPERANDS, "x", variant=_of_tokens)._replace(returns=("out", *POOLS), asked=_ASKED)}
