"""Default variants of selective_scan: prompts of models and serving engines, and the other branches."""

from __future__ import annotations

from typing import Any

from ...spec.kernel import DType, Index, Loads
from ...variants.defaults import Default
from .models import TOKENS
from .problem import LEAST, MOST, Order, SelectiveProblem

MAMBA: dict[str, Any] = {"d_state": 16, "D": DType.F32, "z": True, "delta_bias": DType.F32}
MANY, FEW = 65536, 8192  # channels of all sequences

DEFAULTS = {
    "Mamba-1, a batch from zeros": Default(SelectiveProblem(**MAMBA, **TOKENS, final=True), FEW),
    "Mamba-1, a large batch from zeros": Default(SelectiveProblem(**MAMBA, **TOKENS, final=True), MANY),
    "Mamba-1, a long sequence of few channels": Default(
        SelectiveProblem(**MAMBA, **TOKENS, final=True, segments=MOST, segment_tokens=LEAST), 768
    ),
    "Mamba-1, packed, with a pool": Default(
        SelectiveProblem(**MAMBA, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I32, state=DType.BF16), FEW
    ),
    "any strides, states in and out": Default(
        SelectiveProblem(
            d_state=12, layout=Order.FIRST, copy=0, key_copy=0, x=DType.F16, delta_softplus=False, initial=True, final=True,
            state_loads=Loads.ELEMENT,
        ),
        FEW,
    ),
    "f32, many states": Default(SelectiveProblem(d_state=64, x=DType.F32, z=True, key_layout=Order.FIRST, initial=True, final=True), FEW),
}  # fmt: skip
