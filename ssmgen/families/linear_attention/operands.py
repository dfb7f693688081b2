"""The table of tensors, which layers and prompts share."""

from __future__ import annotations

from ...engine.recurrences.attention.operands import OPERANDS

__all__ = ["OPERANDS"]
