"""The operator families. Each module holds a family's spec, argument layout, tuning space and heuristics."""

from __future__ import annotations

from ..spec import KernelSpec
from . import selective_state_update, slot_copy

# Modules whose problems the registry can select variants for, by operator name.
OPERATORS = {selective_state_update.OPERATOR: selective_state_update}

# Every spec class, by family name: what `parse_spec` and the command line know.
FAMILIES: dict[str, type[KernelSpec]] = {cls.family: cls for cls in (selective_state_update.SsuSpec, slot_copy.SlotCopySpec)}
