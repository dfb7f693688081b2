"""Default variants of mamba3_chunk_scan: the published models' prompts, and every path through the template."""

from __future__ import annotations

from ...engine.recurrences.mamba3.problem import Rate
from ...select.models import Wanted, find_model
from ...spec.kernel import Arch, DType, Index, Loads, changed
from ...variants.defaults import Default, FixedSpec
from .models import ASKS
from .problem import Mamba3PromptProblem
from .rules import parted, spanned, tiled
from .spec import OPERATOR

HEADS = 64  # of both models: one sequence has two spans
BATCH = 4 * HEADS  # fill an H200
FEW = 24  # have three spans


def _of(model: str) -> tuple[Mamba3PromptProblem, Mamba3PromptProblem]:
    """(a batch from zeros, packed with pools)"""
    new, _, packed, *_ = ASKS[OPERATOR].problems(find_model(model), Wanted())
    return new, packed


SISO, SISO_POOL = _of("mamba3-siso-1.5b")
MIMO, MIMO_POOL = _of("mamba3-mimo-1.5b")
CHANGE_REGISTERS = {"since": Arch(90, "a"), "until": Arch(100, "a")}  # warps with roles do
DEFAULTS = {
    "SISO, a batch from zeros": Default(SISO, BATCH),
    "SISO, packed, with pools": Default(SISO_POOL, BATCH),
    "MIMO, a batch from zeros": Default(MIMO, BATCH),
    "MIMO, packed, with pools": Default(MIMO_POOL, BATCH),
    "f16, a norm of the output, an output for each rank, states in and out, not aligned": Default(
        changed(
            MIMO, x=DType.F16, k_state=DType.F32, v_state=DType.F32, state=DType.BF16, norm_weight=DType.F32, by_rank=True, rank=2,
            initial=True, copy=4, state_loads=Loads.ELEMENT,
        ),
        BATCH,
    ),
    "everything ready, no states": Default(
        changed(
            SISO, rate=Rate.LOG_DECAY, dt_softplus=False, trap_sigmoid=False, dt_bias=None, row_norm=None, row_bias=None, angles=0,
            angle=None, D=None, z=False, pool=False, final=False, cu_seqlens=Index.I64,
        ),
        BATCH,
    ),
    "SISO, two blocks for a head": FixedSpec(tiled(SISO, 2)),
    "SISO, in 8 parts": Default(changed(SISO, segments=8), HEADS),
    "MIMO, packed, with pools, in 8 parts": Default(changed(MIMO_POOL, segments=8), HEADS),
    "SISO, in 8 parts, without roles": FixedSpec(parted(changed(SISO, segments=8)), **CHANGE_REGISTERS),
    "MIMO, packed, with pools, in 8 parts, without roles": FixedSpec(parted(changed(MIMO_POOL, segments=8)), **CHANGE_REGISTERS),
    "SISO, in 2 spans": Default(SISO, HEADS),
    "SISO, packed, with pools, in 2 spans": Default(SISO_POOL, HEADS),
    "SISO, packed, with pools, in 3 spans": Default(SISO_POOL, FEW),
    "SISO, packed, with pools, in 4 spans": FixedSpec(spanned(SISO_POOL, 4), **CHANGE_REGISTERS),
    "MIMO, in 2 spans": Default(MIMO, HEADS),
    "MIMO, packed, with pools, in 2 spans": Default(MIMO_POOL, HEADS),
    "rank 3, A by softplus": Default(changed(MIMO_POOL, rank=3, rate=Rate.SOFTPLUS), BATCH),
}  # fmt: skip
