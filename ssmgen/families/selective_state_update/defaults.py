"""Default variants of selective_state_update: decode steps of models, and all options of several tokens."""

from ...select.models import find_model
from ...spec.kernel import FP8, DType, Index, Narrow, PoolMode
from ...variants.defaults import Default

TREE = {
    "intermediates": True, "intermediate_indices": Index.I32, "parents": Index.I32, "cu_seqlens": Index.I32, "accepted": Index.I32,
    "philox_rounds": 10,
}  # fmt: skip
NEMOTRON = find_model("nemotron-h-8b")

DEFAULTS = {
    "Mamba-2, bf16 state": Default(NEMOTRON.problem(DType.BF16, Index.I32, PoolMode.SINGLE)),
    "Mamba-2, f32 state": Default(NEMOTRON.problem(DType.F32, Index.I32, PoolMode.SINGLE)),
    "Mamba-2, f16 state, slots to read and to write": Default(
        find_model("nemotron-nano-9b-v2").problem(DType.F16, Index.I64, PoolMode.SPLIT)
    ),
    "Mamba-2, f32 state, no slots, gate": Default(find_model("falcon-h1-7b").problem(DType.F32, Index.NONE, PoolMode.SINGLE)),
    "Mamba-1": Default(find_model("mamba-130m").problem(DType.F32, Index.I32, PoolMode.SINGLE)),
    "Mamba-1, no slots": Default(find_model("falcon-mamba-7b").problem(DType.F32, Index.NONE, PoolMode.SINGLE), 128),
    "verify: each token's state, the pool as it is": Default(
        NEMOTRON.problem(DType.BF16, Index.I32, PoolMode.SINGLE, tokens=4, intermediates=True, update_state=False), 1
    ),
    "Mamba-2, int8 state": Default(NEMOTRON.problem(Narrow.I8, Index.I32, PoolMode.SINGLE), 128),
    "Mamba-2, fp8 state": Default(NEMOTRON.problem(Narrow.E4M3, Index.I32, PoolMode.SINGLE), 128, FP8),
    "Mamba-2, int16 state, rounded, slots to read and to write": Default(
        NEMOTRON.problem(Narrow.I16, Index.I32, PoolMode.SPLIT, philox_rounds=10), 128
    ),
    "verify: each token's int8 state, rounded": Default(
        NEMOTRON.problem(Narrow.I8, Index.I32, PoolMode.SINGLE, tokens=4, intermediates=True, update_state=False, philox_rounds=10), 1
    ),
    "a packed tree of drafts, rounded": Default(NEMOTRON.problem(DType.F16, Index.I32, PoolMode.SPLIT, tokens=4, **TREE), 1),
}
