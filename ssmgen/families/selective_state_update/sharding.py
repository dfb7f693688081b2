"""The axes of selective_state_update's tensors."""

from __future__ import annotations

from ...calls.sharding import Rule
from ...engine.recurrences.mamba.operands import OPERANDS

RULES = {"selective_state_update": Rule(OPERANDS.axes(), OPERANDS.written, "x")}
