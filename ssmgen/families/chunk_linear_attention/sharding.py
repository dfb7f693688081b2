"""The axes of chunk_linear_attention's tensors."""

from __future__ import annotations

from ...engine.chunks.sharding import rule_of
from .operands import FUNCTIONS, OPERANDS

# Parameters that no kernel takes: torch multiplies v with one, and the other is refused.
_PER_ROW = {"chunk_gdn2": ("w",), "chunk_gla": ("gv",)}
RULES = {
    name: rule_of(OPERANDS, "v", function.words, axes=dict.fromkeys(_PER_ROW.get(name, ()), "batch token head v|token head v"))
    for name, function in FUNCTIONS.items()
}
