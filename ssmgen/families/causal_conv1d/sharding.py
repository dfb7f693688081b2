"""The axes of causal_conv1d's tensors."""

from __future__ import annotations

from ...calls.sharding import Rule
from .operands import OPERANDS

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
