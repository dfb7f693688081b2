"""The axes of the tensors of the linear-attention functions."""

from __future__ import annotations

from ...calls.sharding import Rule
from ...engine.recurrences.attention.operands import OPERANDS, RING
from .operands import FUNCTIONS

_AXES = OPERANDS.axes()
_AXES |= {f"ring.{name}": _AXES.pop(f"ring_{name}") for name in RING}
_AXES["ring.g"] += f"|{_AXES.pop('ring_gk')}"
_WRITTEN = tuple([name.replace("ring_", "ring.") for name in OPERANDS.written if name != "ring_gk"])
_commit = Rule(_AXES, ("state",), returns=("state",), by_sequence=False, layers=True, tuples={"ring": RING})

RULES = {
    name: _commit
    if function.commit
    else Rule(_AXES | {n: _AXES[role] for n, role in function.roles.items()}, _WRITTEN, "v", tuples={"ring": RING})
    for name, function in FUNCTIONS.items()
}
