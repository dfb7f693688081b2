"""What the axes of decode layers' tensors are, whatever the recurrence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..calls.sharding import CONTROL, Rule

_ROWS = "* head|* head row"
AXES = {
    **CONTROL,
    **dict.fromkeys(("z", "out"), _ROWS),
    "state": "batch head row n",
    "intermediate_states": "batch token head row n",
    "arrivals": "batch group",
}
# Arrivals are zeros ahead of a call and behind it: each rank counts in its own.
WRITTEN = ("state", "conv_state", "out", "intermediate_states", "intermediate_conv_window")


def rule_of(inputs: str, axes: Mapping[str, str], kinds: Callable[[Mapping[str, Any]], Mapping[str, str]]) -> Rule:
    """The rule of a layer whose operand `inputs` is convolved. kinds: what a call's arguments say of its channels, and of other axes."""

    def variant(given: Mapping[str, Any]) -> Mapping[str, str]:
        named = kinds(given)
        channels = named.get("channels", "channels")
        of_channels = {
            inputs: f"* {channels}",
            "conv_state": f"batch {channels} tap",
            "conv_weight": f"{channels} tap",
            "conv_bias": channels,
            "intermediate_conv_window": f"batch token {channels} tap",
        }
        return of_channels | {name: axis for name, axis in named.items() if name != "channels"}

    return Rule({**AXES, **axes, **variant({})}, WRITTEN, inputs, inner=1, variant=variant)


def sizes(given: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """(heads, the two axes behind them, groups) of a call, whose checks will say what is wrong where that is None."""
    state: Any = given.get("state")
    arrivals: Any = given.get("arrivals")
    if getattr(state, "ndim", 0) != 4 or getattr(arrivals, "ndim", 0) != 2:
        return None
    return state.shape[1], state.shape[2], state.shape[3], arrivals.shape[1]
