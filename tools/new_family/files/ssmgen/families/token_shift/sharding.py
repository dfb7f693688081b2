"""What the axes of token_shift's tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule
from .spec import OPERANDS

RULES = {"token_shift": Rule(OPERANDS.axes(), OPERANDS.written)}
