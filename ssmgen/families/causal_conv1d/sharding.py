"""What the axes of causal_conv1d's tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule

RULES = {
    "causal_conv1d": Rule(
        {
            **dict.fromkeys(("x", "out"), "batch head token|head token"),
            "weight": "head tap",
            "bias": "head",
            **dict.fromkeys(("initial_states", "final_states_out", "conv_states"), "batch head tap"),
            "seq_idx": "batch token",
            **dict.fromkeys(("conv_state_indices", "has_initial_state"), "batch"),
        },
        ("final_states_out", "conv_states", "out"),
        anchors=("conv_states", "final_states_out", "out", "x"),
        returns=("out", "final_states_out"),
    )
}
