"""Sharding rules of decode layers, for any recurrence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...calls.sharding import Rule
from ...spec.operands import Table


def rule_of(operands: Table, inputs: str, kinds: Callable[[Mapping[str, Any]], Mapping[str, str]]) -> Rule:
    """The rule of a layer whose operand `inputs` is convolved. kinds: from a call's arguments to the kinds of its channels, and other
    axes."""
    axes = operands.axes()

    def variant(given: Mapping[str, Any]) -> Mapping[str, str]:
        named = kinds(given)
        channels = named.get("channels", "channels")
        of_channels = {name: words.replace("channels", channels) for name, words in axes.items() if "channels" in words.split()}
        return of_channels | {name: axis for name, axis in named.items() if name != "channels"}

    # Arrivals are zero before and after a call: each rank counts in its own tensor.
    written = tuple([name for name in operands.written if name != "arrivals"])
    return Rule({**axes, **variant({})}, written, inputs, inner=1, variant=variant)


def sizes(given: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """(heads, the next two axes, groups) of a call. None for wrong shapes, which the call's checks will report."""
    state: Any = given.get("state")
    arrivals: Any = given.get("arrivals")
    if getattr(state, "ndim", 0) != 4 or getattr(arrivals, "ndim", 0) != 2:
        return None
    return state.shape[1], state.shape[2], state.shape[3], arrivals.shape[1]
