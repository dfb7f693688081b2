"""What the axes of chunk_scan's tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule

RULES = {
    "chunk_scan": Rule(
        {
            **dict.fromkeys(("x", "z", "out"), "batch token head row|token head row"),
            "dt": "batch token head|token head",
            **dict.fromkeys(("B", "C"), "batch token group n|token group n"),
            **dict.fromkeys(("A", "dt_bias"), "head"),
            "D": "head row|head",
            **dict.fromkeys(("initial_states", "final_states_out", "state"), "batch head row n"),
            **dict.fromkeys(("state_indices", "has_initial_state"), "batch"),
            "seq_idx": "batch token|token",
            "checkpoint_positions": "position",
            "checkpoints_out": "position head row n",
        },
        ("final_states_out", "state", "checkpoints_out", "out"),
        anchors=("state", "final_states_out", "out", "x"),
        returns=("out", "final_states_out", "checkpoints_out"),
        asked={"final_states_out": "return_final_states", "checkpoints_out": "return_checkpoints"},
    )
}
