"""The tensors of causal_conv1d. Views of x and out are [batch, dim, length]; packed sequences are a batch of 1."""

from __future__ import annotations

from ...calls.sharding import Rule
from ...engine.window import BESIDE, RESIDUALS
from ...spec.operands import Operand, Types, table

_STATES = "sequences dim tap"
_STRIDES = "slot:64 dim tap"


def _states(name: str, there: str, axes: str = _STATES, may_be: tuple[str, ...] = ()) -> Operand:
    return Operand(
        name, axes, optional=True, written=name != "initial_states", may_be=may_be, field="x", there=there, view="slot dim tap",
        strides=_STRIDES,
    )  # fmt: skip


OPERANDS = table(
    Operand("x", "batch dim token | dim token", view="batch dim length", strides="batch?!ragged dim?across length?along"),
    Operand("weight", "dim width", view="dim tap", strides="dim?loose_taps tap?loose_taps"),
    Operand("bias", "dim", optional=True, strides="dim?loose_taps"),
    Operand("seq_idx", "batch token", Types.I32, optional=True, view="batch length", strides="batch length"),
    Operand("query_start_loc", "starts", Types.INDEX, optional=True, view="sequence", strides="sequence"),
    _states("initial_states", "initial"),
    _states("final_states", "final", may_be=("initial_states",)),
    _states("conv_states", "pool", "slot dim tap"),
    Operand("conv_state_indices", "sequences", Types.INDEX, optional=True, field="index", view="sequence", strides="sequence"),
    Operand("has_initial_state", "sequences", Types.BOOL, optional=True, there="started", view="sequence", strides="sequence"),
    *[Operand(name, "like x", optional=True, field="x", there=name) for name in BESIDE],
    Operand("out", "like x", written=True, field="x", may_be=RESIDUALS),
    tap="width - 1", token="length", starts="sequences + 1",
)  # fmt: skip

# How a mesh of devices may divide them.
_AXES = OPERANDS.axes()
_AXES["final_states_out"] = _AXES.pop("final_states")  # the function's name for it
RULES = {
    "causal_conv1d": Rule(
        _AXES,
        ("final_states_out", "conv_states", "out"),
        anchors=("conv_states", "final_states_out", "out", "x"),
        returns=("out", "final_states_out"),
    )
}
