"""The axes of causal_conv1d_update's tensors."""

from __future__ import annotations

from ...calls.sharding import Rule
from .operands import OPERANDS

RULES = {"causal_conv1d_update": Rule(OPERANDS.axes(), OPERANDS.written, anchors=("conv_state",))}
