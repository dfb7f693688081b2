"""What the axes of the linear-attention functions' tensors are."""

from __future__ import annotations

from ...calls.sharding import CONTROL, Rule
from ...engine.recurrences.attention.operands import OPERANDS
from .functions import FUNCTIONS

_RING = ("k", "v", "g", "beta")
_AXES = {
    **OPERANDS,
    "out": OPERANDS["v"],
    "state": "batch head row n",
    "intermediate_states": "batch token head row n",
    "state_scale": "batch head row",
    "ring.k": "batch token group n",
    **dict.fromkeys(("ring.v", "ring.g", "ring.beta"), "batch token head n|batch token head"),
    **CONTROL,
}
_WRITTEN = ("state", "out", "intermediate_states", "state_scale", *[f"ring.{name}" for name in _RING])
_commit = Rule(_AXES, ("state",), returns=("state",), by_sequence=False, layers=True, tuples={"ring": _RING})

RULES = {
    name: _commit
    if function.commit
    else Rule(_AXES | {n: OPERANDS[role] for n, role in function.roles.items()}, _WRITTEN, "v", tuples={"ring": _RING})
    for name, function in FUNCTIONS.items()
}
