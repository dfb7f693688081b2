"""What the axes of selective_state_update's tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule
from ...engine.recurrences.mamba.sharding import AXES

RULES = {
    "selective_state_update": Rule(
        AXES
        | {"state": "batch head row n|batch head n", "intermediate_states": "batch token head row n"}
        | {"state_scale": "batch head row|batch head", "intermediate_state_scales": "batch token head row"},
        ("state", "out", "intermediate_states", "state_scale", "intermediate_state_scales"),
        "x",
    )
}
