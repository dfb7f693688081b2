"""The tensors that each norm takes."""

from __future__ import annotations

from ...engine.norm_operands import OPERANDS, SHARED

__all__ = ["FUNCTIONS", "OPERANDS", "SHARED"]

FUNCTIONS = {
    "gated_rms_norm": OPERANDS.only("x", "gate", "weight", "out"),
    "gated_layer_norm": OPERANDS.only("x", "gate", "weight", "bias", "out"),
    "rms_norm": OPERANDS.only("x", "residual", "weight", "out", "residual_out"),
}
