"""The tensors of selective_state_update. Layers share the table."""

from __future__ import annotations

from ...calls.sharding import Rule
from ...engine.recurrences.mamba.operands import OF_SEVERAL, OPERANDS

__all__ = ["OF_SEVERAL", "OPERANDS"]

# How a mesh of devices may divide them.
RULES = {"selective_state_update": Rule(OPERANDS.axes(), OPERANDS.written, "x")}
