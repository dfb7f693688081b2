"""The axes of mamba3_state_update's tensors."""

from __future__ import annotations

from ...calls.sharding import Rule
from .operands import OPERANDS

RULES = {"mamba3_state_update": Rule(OPERANDS.axes(), OPERANDS.written, "x")}
