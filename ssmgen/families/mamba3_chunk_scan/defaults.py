"""Default variants of mamba3_chunk_scan: the published models' prompts, and every path through the template."""

from __future__ import annotations

from ...engine.recurrences.mamba3.problem import Rate
from ...select.models import Wanted, find_model
from ...spec.kernel import DType, Index, Loads, changed
from ...variants.defaults import Default
from .models import ASKS
from .spec import OPERATOR


def _of(model: str) -> tuple[Default, Default]:
    """(a batch from zeros, packed with pools)"""
    found = find_model(model)
    new, _, packed = ASKS[OPERATOR].problems(found, Wanted())
    return Default(new, found.nheads), Default(packed, found.nheads)


SISO, SISO_POOL = _of("mamba3-siso-1.5b")
MIMO, MIMO_POOL = _of("mamba3-mimo-1.5b")
DEFAULTS = {
    "SISO, a batch from zeros": SISO,
    "SISO, packed, with pools": SISO_POOL,
    "MIMO, a batch from zeros": MIMO,
    "MIMO, packed, with pools": MIMO_POOL,
    "f16, a norm of the output, an output for each rank, states in and out, not aligned": Default(
        changed(
            MIMO.problem, x=DType.F16, k_state=DType.F32, v_state=DType.F32, state=DType.BF16, norm_weight=DType.F32, by_rank=True, rank=2,
            initial=True, copy=4, state_loads=Loads.ELEMENT,
        ),
        64,
    ),
    "everything ready, no states": Default(
        changed(
            SISO.problem, rate=Rate.LOG_DECAY, dt_softplus=False, trap_sigmoid=False, dt_bias=None, row_norm=None, row_bias=None, angles=0,
            angle=None, D=None, z=False, pool=False, final=False, cu_seqlens=Index.I64,
        ),
        64,
    ),
    "rank 3, A by softplus": Default(changed(MIMO_POOL.problem, rank=3, rate=Rate.SOFTPLUS), 64),
}  # fmt: skip
