"""The tensors that all decode layers have: for the short convolution, and for the slots that states are read from and written to.

`channels` is the axis that is convolved. A rule for DTensors replaces that word by the kinds of channels in a call (`rule_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...calls.sharding import Rule
from ...spec.operands import Operand, Table, Types

TOKEN = "batch token?several"  # strides of an operand with tokens
WIDE = "row:64 token:64"


def convolution(inputs: str) -> tuple[Operand, ...]:
    """The convolution's operands, in the order of a kernel's parameters; inputs: the operand that is convolved."""
    return (
        Operand(
            "conv_state", "slot channels tap", written=True, field="conv_dtype", view="slot dim tap",
            strides="slot:64 dim?conv.any_place tap?!conv.runs",
        ),
        Operand(inputs, "token channels", field="conv_dtype", view="token dim", strides=f"{TOKEN} dim?conv.loose"),
        Operand("conv_weight", "channels width", field="conv.weight", view="dim tap", strides="dim?conv.loose_taps tap?conv.loose_taps"),
        Operand("conv_bias", "channels", optional=True, field="conv.bias", view="dim", strides="dim?conv.loose_taps"),
        Operand(
            "intermediate_conv_window", "kept token+ channels tap", optional=True, written=True, field="conv_dtype", there="conv.saves",
            view="slot token dim tap", strides="slot:64 token dim?conv.saves_any tap?conv.saves_any",
        ),
    )  # fmt: skip


def control(kept: str, axes: str, *behind: Operand) -> tuple[Operand, ...]:
    """Operands that locate states to read and to write. kept: the spec's field with the type of intermediate states, whose axes are `axes`;
    behind: operands between these and the arrival counts."""
    return (
        Operand("state_indices", "batch | batch column", Types.INDEX, optional=True, field="index", strides="batch column?conv_rolls"),
        Operand("dst_state_indices", "batch token", Types.INDEX, optional=True, field="index", there="each", strides="batch token"),
        Operand("num_accepted_tokens", "batch", Types.INDEX, optional=True, field="accepted", strides="batch"),
        Operand(
            "intermediate_states", f"kept token+ {axes}", optional=True, written=True, field=kept, there="intermediates",
            view="row token", strides=WIDE,
        ),
        Operand("intermediate_state_indices", "batch", Types.INDEX, optional=True, field="rows_index", strides="batch"),
        *behind,
        Operand("arrivals", "slot group", Types.I32, written=True, there="conv_moves", strides="slot:64"),
    )  # fmt: skip


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
