"""What the axes of the replay functions' tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule
from ...engine.recurrences.mamba.sharding import AXES

_AXES = AXES | {
    "state": "batch head row n",
    "state_scale": "batch head row",
    "old_x": "batch token head row",
    "old_B": "batch buffer token group n|batch token group n",
    **dict.fromkeys(("old_dt", "old_dA_cumsum"), "batch buffer head token|batch head token"),
    **dict.fromkeys(("cache_buf_idx", "ring_start", "prev_num_accepted_tokens", "arrivals"), "batch"),
}
_WRITTEN = (
    "state", "old_x", "old_B", "old_dt", "old_dA_cumsum", "cache_buf_idx", "ring_start", "prev_num_accepted_tokens", "arrivals", "out",
    "state_scale",
)  # fmt: skip
_step = Rule(_AXES, _WRITTEN, "x")

RULES = {
    "replay_selective_state_update": _step,
    "checkpoint_selective_state_update": _step,
    "materialize_selective_state": Rule(_AXES | {"out": "batch head row n"}, ("out",)),
}
