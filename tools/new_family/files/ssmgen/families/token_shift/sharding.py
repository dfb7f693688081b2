"""The sharding rule of token_shift."""

from __future__ import annotations

from ...calls.sharding import Rule
from .spec import OPERANDS

RULES = {"token_shift": Rule(OPERANDS.axes(), OPERANDS.written)}
