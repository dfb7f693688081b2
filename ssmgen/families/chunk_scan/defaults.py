"""Default variants of chunk_scan: prompts of models and serving engines, and the other branches."""

from __future__ import annotations

from typing import Any

from ...spec.kernel import DType, Index, Loads
from ...variants.defaults import Default
from .spec import WITHOUT_DT, Gate, ScanProblem

MAMBA2: dict[str, Any] = {"headdim": 64, "d_state": 128, "D": DType.BF16, "dt_bias": DType.BF16}
WIDE: dict[str, Any] = {"headdim": 128, "d_state": 256}
POOL: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True, "index": Index.I32}

DEFAULTS = {
    "Mamba-2, a batch from zeros": Default(ScanProblem(**MAMBA2, final=True), 128),
    "Mamba-2, a batch from zeros, few heads": Default(ScanProblem(**MAMBA2, final=True), 16),
    "Mamba-2, packed, with a pool": Default(ScanProblem(**MAMBA2, state=DType.BF16, **POOL), 128),
    "Mamba-2, packed, with a pool, many short sequences": Default(ScanProblem(**MAMBA2, state=DType.BF16, **POOL, short=True), 128),
    "Mamba-2, packed, with states for a cache of prefixes": Default(
        ScanProblem(**MAMBA2, state=DType.BF16, **POOL, checkpoints=Index.I32), 128
    ),
    "Mamba-2, packed, with states for a cache of prefixes, few heads": Default(
        ScanProblem(**MAMBA2, cu_seqlens=Index.I32, initial=True, checkpoints=Index.I32), 16
    ),
    "Mamba-2, a batch of several sequences in each row": Default(ScanProblem(**MAMBA2, final=True, seq_idx=True), 128),
    "Mamba-2, rows of 256, a batch from zeros, few heads": Default(ScanProblem(**MAMBA2 | WIDE, final=True), 24),
    "Mamba-2, rows of 256, packed, with a pool": Default(ScanProblem(**MAMBA2 | WIDE, state=DType.BF16, **POOL), 256),
    "Mamba-2, heads of 80 rows, packed, with a pool, many short sequences": Default(
        ScanProblem(**MAMBA2 | {"headdim": 80}, state=DType.BF16, **POOL, short=True), 128
    ),
    "a gate, states in and out, 4 bytes at once": Default(
        ScanProblem(
            headdim=128, d_state=64, z=True, D=DType.F32, dt_limit=True, initial=True, final=True, copy=4, state_loads=Loads.ELEMENT
        ),
        16,
    ),
    "f32, split": Default(
        ScanProblem(headdim=64, d_state=128, x=DType.F32, dt=DType.F32, D=DType.F32, dt_bias=DType.F32, z=True, final=True), 128
    ),
    "simple GLA, a batch from zeros": Default(
        ScanProblem(headdim=128, d_state=128, gate=Gate.LOG, g=DType.F32, **WITHOUT_DT, final=True), 32
    ),
    "Lightning attention, packed, with a pool": Default(
        ScanProblem(headdim=128, d_state=128, gate=Gate.SLOPE, g=DType.F32, **WITHOUT_DT, **POOL), 64
    ),
    "f16, long rows of the state": Default(ScanProblem(headdim=64, d_state=256, x=DType.F16, dt=DType.F32, dt_softplus=False), 128),
}
