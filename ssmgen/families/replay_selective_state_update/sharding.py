"""The axes of the replay functions' tensors."""

from __future__ import annotations

from ...calls.sharding import Rule
from .operands import BETWEEN, OPERANDS

_AXES = OPERANDS.axes()
# Noise depends on an element's place in the pool, so a call with seeds is not divided.
_step = Rule(_AXES, tuple([name for name in OPERANDS.written if name not in ("rand_seed", *BETWEEN)]), "x")

RULES = {
    "replay_selective_state_update": _step,
    "checkpoint_selective_state_update": _step,
    "materialize_selective_state": Rule(_AXES | {"out": "batch head row n"}, ("out",)),
}
