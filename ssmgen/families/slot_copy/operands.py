"""The tensors of slot_copy."""

from __future__ import annotations

from ...spec.operands import Operand, Types, table

OPERANDS = table(
    Operand("state", "slot word", written=True, field="word", strides="slot:64"),
    Operand("state_indices", "batch", Types.I32),
    word="words",
)
