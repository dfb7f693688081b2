"""What the axes of chunk_delta_rule's tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule


def _rule(**gates: str) -> Rule:
    """gates: their axes, where there are any beside beta."""
    return Rule(
        {
            **dict.fromkeys(("q", "k"), "batch token group k|token group k"),
            **dict.fromkeys(("v", "out"), "batch token head v|token head v"),
            "beta": "batch token head|token head",
            **gates,
            **dict.fromkeys(("initial_states", "final_states_out", "state"), "batch head row n"),
            **dict.fromkeys(("state_indices", "has_initial_state"), "batch"),
            "checkpoint_positions": "position",
            "checkpoints_out": "position head row n",
            "workspace": "byte",  # each rank's own, and no tensor of all of them: what is in it is of no use to others
        },
        ("final_states_out", "state", "checkpoints_out", "out"),
        anchors=("state", "final_states_out", "out", "v"),
        returns=("out", "final_states_out", "checkpoints_out"),
        asked={"final_states_out": "return_final_states", "checkpoints_out": "return_checkpoints"},
    )


RULES = {
    "chunk_gated_delta_rule": _rule(g="batch token head|token head", **dict.fromkeys(("A_log", "dt_bias"), "head")),
    "chunk_delta_rule": _rule(),
}
