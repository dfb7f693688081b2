"""Default variants of mamba3_state_update: the published models' steps, and every path through the template."""

from ...engine.recurrences.mamba3.problem import Rate
from ...select.models import find_model
from ...spec.kernel import DType, Index, Loads, PoolMode, Update, changed
from ...variants.defaults import Default

SISO = find_model("mamba3-siso-1.5b").problem(DType.BF16, Index.I32, PoolMode.SINGLE)
MIMO = find_model("mamba3-mimo-1.5b").problem(DType.BF16, Index.I32, PoolMode.SINGLE)
READY = changed(
    MIMO, rate=Rate.READY, dt_softplus=False, trap_sigmoid=False, dt_bias=None, row_norm=None, row_bias=None, angles=0, angle=None,
    index=Index.NONE, by_rank=True, D=None,
)  # fmt: skip

DEFAULTS = {
    "SISO, bf16 state": Default(SISO),
    "MIMO, bf16 state": Default(MIMO),
    "SISO, f32 state, slots to read and to write": Default(changed(SISO, state=DType.F32, index=Index.I64, pool=PoolMode.SPLIT), 64),
    "MIMO, f16 state, rounded, norm of the output, not aligned": Default(
        changed(MIMO, state=DType.F16, philox_rounds=10, norm_weight=DType.F32, state_loads=Loads.ELEMENT, operand_loads=Loads.ELEMENT)
    ),
    "MIMO, everything ready, an output for each rank": Default(READY),
    "drafts: a slot for each token": Default(
        changed(MIMO, several=True, accepted=Index.I32, pool=PoolMode.SPLIT, update=Update.EACH, rate=Rate.SOFTPLUS), 8
    ),
    "SISO, several tokens": Default(changed(SISO, several=True), 8),
}
