"""The axes of mamba3_chunk_scan's tensors."""

from __future__ import annotations

from ...engine.chunks.sharding import rule_of
from .operands import OPERANDS, POOLS

_ASKED = dict.fromkeys(POOLS, "return_final_states")
RULES = {"mamba3_chunk_scan": rule_of(OPERANDS, "x")._replace(returns=("out", *POOLS), asked=_ASKED)}
