"""What the axes of chunk_scan's tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule

_STATES = {
    **dict.fromkeys(("initial_states", "final_states_out", "state"), "batch head row n"),
    **dict.fromkeys(("state_indices", "has_initial_state"), "batch"),
}


def _attention(**decay: str) -> Rule:
    keys = dict.fromkeys(("q", "k"), "batch token group n|token group n")
    rows = dict.fromkeys(("v", "out"), "batch token head row|token head row")
    return Rule(
        {**keys, **rows, **decay, **_STATES},
        ("final_states_out", "state", "out"),
        anchors=("state", "final_states_out", "out", "v"),
        returns=("out", "final_states_out"),
        asked={"final_states_out": "return_final_states"},
    )


RULES = {
    "chunk_scan": Rule(
        {
            **dict.fromkeys(("x", "z", "out"), "batch token head row|token head row"),
            "dt": "batch token head|token head",
            **dict.fromkeys(("B", "C"), "batch token group n|token group n"),
            **dict.fromkeys(("A", "dt_bias"), "head"),
            "D": "head row|head",
            **_STATES,
            "seq_idx": "batch token|token",
            "checkpoint_positions": "position",
            "checkpoints_out": "position head row n",
        },
        ("final_states_out", "state", "checkpoints_out", "out"),
        anchors=("state", "final_states_out", "out", "x"),
        returns=("out", "final_states_out", "checkpoints_out"),
        asked={"final_states_out": "return_final_states", "checkpoints_out": "return_checkpoints"},
    ),
    "chunk_simple_gla": _attention(g="batch token head|token head|head"),
    "chunk_lightning_attn": _attention(slope="head"),
}
