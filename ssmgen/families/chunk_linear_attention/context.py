"""Context parallel calls of chunk_linear_attention's functions: the same method as in chunk_delta_rule."""

from __future__ import annotations

from ...engine.chunks.context import rule
from .operands import FUNCTIONS

_PARTS = ("chunk_kda", "chunk_gdn2", "chunk_comba")  # functions that also cut sequences into segments
RULES = {name: rule("v", *(("w",) if name == "chunk_gdn2" else ()), parts=name in _PARTS) for name in FUNCTIONS}
