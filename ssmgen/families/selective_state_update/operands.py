"""The table of tensors; the layer families use it too."""

from __future__ import annotations

from ...engine.recurrences.mamba.operands import OF_SEVERAL, OPERANDS

__all__ = ["OF_SEVERAL", "OPERANDS"]
