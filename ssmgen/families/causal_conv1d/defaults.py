"""Default variants of causal_conv1d: the variant of a Mamba-2, and the other branches."""

from typing import Any

from ...select.models import find_model
from ...spec.kernel import DType, Index, Loads
from ...variants.defaults import Default, words
from .spec import ConvLayout, ConvProblem

STATES: dict[str, Any] = {"seq_idx": True, "initial": True, "final": True}
PACKED: dict[str, Any] = {"query_start_loc": Index.I32, "pool": True, "started": True, "index": Index.I32}
GATED: dict[str, Any] = {"layout": ConvLayout.LAST, "silu": False, "input_gate": True, "output_gate": True}

DEFAULTS = {
    **{f"Mamba-2: {words(p)}": Default(p) for p in find_model("nemotron-h-8b").convolutions((Index.I32,)) if isinstance(p, ConvProblem)},
    **{f"{at.value}, states": Default(ConvProblem(layout=at, width=4, bias=DType.BF16, **STATES), 1) for at in ConvLayout},
    **{
        f"{at.value}, not aligned": Default(ConvProblem(layout=at, width=3, loads=Loads.ELEMENT, taps=Loads.ELEMENT, silu=False), 1)
        for at in ConvLayout
    },
    "gates of packed sequences, as LFM2 has them": Default(ConvProblem(width=3, **GATED, **PACKED), 1),
    "taps apart, packed sequences": Default(ConvProblem(layout=ConvLayout.LAST, width=4, dilation=3, **PACKED), 1),
    "taps apart, residuals, packed sequences, as Qwen4-Exp has them": Default(
        ConvProblem(layout=ConvLayout.LAST, width=4, dilation=3, residual=True, outer_residual=True, **PACKED), 1
    ),
    "gates, as LFM2 has them": Default(ConvProblem(width=3, **GATED), 1),
}
