"""How sequences of chunk_linear_attention's functions go on from one rank's tokens to the next one's: as those of chunk_delta_rule."""

from __future__ import annotations

from ...engine.chunks.context import rule
from .operands import FUNCTIONS

_PARTS = ("chunk_kda", "chunk_gdn2", "chunk_comba")  # whose sequences are cut into segments too
RULES = {name: rule("v", *(("w",) if name == "chunk_gdn2" else ()), parts=name in _PARTS) for name in FUNCTIONS}
