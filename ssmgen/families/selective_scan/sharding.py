"""What the axes of selective_scan's tensors are: channels are what others call heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calls.sharding import Rule


def _per_token(given: Mapping[str, Any]) -> dict[str, str]:
    """Axes of what has tokens: whether channels come first is an option, and whether there are groups the number of axes."""
    u, first = given["u"], given.get("channels_first", False)
    batch = "batch " if u.dim() == 3 else ""
    rows, groups, keys = ("head token", "group n token", "n token") if first else ("token head", "token group n", "token n")
    return {
        **dict.fromkeys(("u", "delta", "z", "out"), batch + rows),
        **{name: batch + (groups if name in given and given[name].dim() > u.dim() else keys) for name in ("B", "C")},
    }


RULES = {
    "selective_scan": Rule(
        {
            **dict.fromkeys(("u", "delta", "z", "out"), "batch token head|token head"),  # where channels come last
            **dict.fromkeys(("B", "C"), "batch token group n|batch token n|token n"),
            "A": "head n",
            **dict.fromkeys(("D", "delta_bias"), "head"),
            **dict.fromkeys(("initial_states", "final_states_out", "state"), "batch head n"),
            **dict.fromkeys(("state_indices", "has_initial_state"), "batch"),
        },
        ("final_states_out", "state", "out"),
        anchors=("state", "final_states_out", "out", "u"),
        returns=("out", "final_states_out"),
        asked={"final_states_out": "return_final_states"},
        variant=_per_token,
    )
}
