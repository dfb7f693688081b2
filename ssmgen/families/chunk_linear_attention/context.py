"""How sequences of chunk_linear_attention's functions go on from one rank's tokens to the next one's: as those of chunk_delta_rule."""

from __future__ import annotations

from ..chunk_delta_rule.context import RULE
from .operands import FUNCTIONS

RULES = dict.fromkeys(FUNCTIONS, RULE)
