"""Default variants of chunk_delta_rule: prompts of models and serving engines, and the other branches."""

from __future__ import annotations

from typing import Any

from ...engine.recurrences.attention.problem import Beta
from ...spec.kernel import DType, Index, Layout, Loads
from ...variants.defaults import Default
from .problem import DeltaProblem, Gate

GATED: dict[str, Any] = {"head_k": 128, "head_v": 128, "gate": Gate.LOG, "g": DType.F32, "l2norm": True}
RAW: dict[str, Any] = {"gate": Gate.RAW, "g": DType.BF16, "A_log": DType.F32, "dt_bias": DType.BF16, "beta_form": Beta.SIGMOID}
POOL: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True, "index": Index.I32}

DEFAULTS = {
    "Gated DeltaNet, a batch from zeros": Default(DeltaProblem(**GATED, final=True), 32),
    "Gated DeltaNet, packed, with a pool": Default(DeltaProblem(**GATED | RAW, **POOL), 32),
    "Gated DeltaNet, packed, states in and out, and for a cache of prefixes": Default(
        DeltaProblem(**GATED, cu_seqlens=Index.I32, initial=True, final=True, checkpoints=Index.I32, layout=Layout.KV), 32
    ),
    "Gated DeltaNet of OLMo-Hybrid, negative eigenvalues, 4 bytes at once": Default(
        DeltaProblem(
            **GATED | RAW | {"head_k": 96, "head_v": 192, "beta_form": Beta.TWICE_SIGMOID},
            initial=True,
            final=True,
            copy=4,
            state_loads=Loads.ELEMENT,
        ),
        30,
    ),
    "Gated DeltaNet of few heads, packed, in segments": Default(
        DeltaProblem(**GATED, cu_seqlens=Index.I32, initial=True, final=True, segments=8, segment_chunks=16), 8
    ),
    "DeltaNet, f16, as it is given": Default(
        DeltaProblem(head_k=64, head_v=64, x=DType.F16, beta=DType.F32, state=DType.BF16, final=True), 16
    ),
    "a decay, 0 to 1": Default(DeltaProblem(head_k=128, head_v=128, gate=Gate.LINEAR, g=DType.F32, beta=DType.F32, final=True), 16),
}
