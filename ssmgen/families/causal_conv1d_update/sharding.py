"""What the axes of causal_conv1d_update's tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule
from .spec import CHILDREN

RULES = {
    "causal_conv1d_update": Rule(
        {
            **dict.fromkeys(("x", "out"), "batch head token|batch head"),
            "conv_state": "batch head tap",
            "weight": "head tap",
            "bias": "head",
            "intermediate_conv_window": "batch token head tap",
            **dict.fromkeys(("parents", *CHILDREN), "batch token"),
            **dict.fromkeys(("cache_seqlens", "conv_state_indices", "num_accepted_tokens", "intermediate_state_indices"), "batch"),
        },
        ("conv_state", "intermediate_conv_window", "parents_out", "out"),
        anchors=("conv_state",),
    )
}
