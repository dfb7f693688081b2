"""The operator families. Each module holds a family's spec, argument layout, tuning space and heuristics."""

from __future__ import annotations

from ..spec import KernelSpec
from . import linear_attention, selective_state_update, slot_copy
from .row_engine import RowProblem

# Modules whose problems the registry can select variants for, by operator name.
OPERATORS = {module.OPERATOR: module for module in (selective_state_update, linear_attention)}

# The operator that poses such a problem.
OPERATOR_OF: dict[type[RowProblem], str] = {
    selective_state_update.SsuProblem: selective_state_update.OPERATOR,
    linear_attention.LinearAttentionProblem: linear_attention.OPERATOR,
}

# Every spec class, by family name: what `parse_spec` and the command line know.
FAMILIES: dict[str, type[KernelSpec]] = {
    cls.family: cls for cls in (selective_state_update.SsuSpec, linear_attention.LinearAttentionSpec, slot_copy.SlotCopySpec)
}
