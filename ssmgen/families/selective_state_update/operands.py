"""The table of tensors, which layers share."""

from __future__ import annotations

from ...engine.recurrences.mamba.operands import OF_SEVERAL, OPERANDS

__all__ = ["OF_SEVERAL", "OPERANDS"]
