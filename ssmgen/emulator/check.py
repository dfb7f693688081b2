"""`ssmgen check`: one variant through the emulator, against the float64 reference, on operands made from the spec alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import Arguments
from ..errors import SsmgenError
from ..kernels.selective_state_update import SsuSpec
from ..ops import selective_state_update as op
from ..ops.checks import TORCH_DTYPES
from ..reference import norm_error
from ..reference.selective_state_update import selective_state_update as reference
from ..spec import Arch, DType, Index, KernelSpec, Loads, PoolMode
from . import run

LIMIT = (0.01, 0.1)
# Norm error that one rounding to the dtype, and f32 arithmetic, leave.
TOLERANCE = {DType.F32: 2e-6, DType.F16: 6e-4, DType.BF16: 5e-3}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Norm errors against float64."""

    state_error: float
    out_error: float
    blocks: int
    passed: bool


def check(spec: KernelSpec, arch: Arch, batch: int = 3, seed: int = 0) -> Outcome:
    """Runs a variant on `batch` rows, the second of them padded if there are slots.

    Raises EmulatorError when the kernel does what it must not, EmulatorMissingError without a compiler, SpecError.
    """
    if not isinstance(spec, SsuSpec):
        raise SsmgenError(f"{spec.family} has no reference to be checked against")
    spec.check(arch)
    named = operands(spec, batch, seed)
    views = op.headed_views(named, problems := [])
    assert not problems, problems
    expected = {"state": views["state"].double(), "out": torch.zeros(views["out"].shape, dtype=torch.float64)}
    limit = LIMIT if spec.dt_limit else None
    inputs = {name: view for name, view in views.items() if name not in expected}
    reference(**expected, **inputs, dt_softplus=spec.dt_softplus, dt_limit=limit, dtype=torch.float64)
    grid = batch * spec.nheads * spec.tiles
    packed = Arguments(spec, op.kernel_values(spec, views, -1, limit)).at([t.data_ptr() for t in named.values()])
    run(spec, arch, grid, packed, named)
    used = sorted({int(s) for s in named.get("state_indices", torch.arange(batch)) if s >= 0} | set(_destinations(named, batch)))
    errors = [norm_error(views["state"][used], expected["state"][used]), norm_error(views["out"], expected["out"])]
    bounds = [TOLERANCE[spec.state], max(TOLERANCE[spec.out], 1e-5)]
    return Outcome(*errors, grid, all(e <= b for e, b in zip(errors, bounds, strict=True)))


def _destinations(named: dict[str, Tensor], batch: int) -> list[int]:
    return [int(s) for s in named.get("dst_state_indices", []) if s >= 0]


def operands(spec: SsuSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Random operands of a spec, by name and in the kernel's order; misaligned ones where it is made for that."""
    g = torch.Generator().manual_seed(seed)
    B, H, P, N, G = batch, spec.nheads, spec.headdim, spec.d_state, spec.ngroups
    slots = batch if spec.index is Index.NONE else 3 * batch

    def randn(dtype: DType, *shape: int, odd: bool = False) -> Tensor:
        values = torch.randn(*shape, generator=g).to(TORCH_DTYPES[dtype])
        if not odd:
            return values
        wide = torch.empty(*shape[:-1], shape[-1] + 1, dtype=values.dtype)  # rows that start at odd places
        wide[..., 1:] = values
        return wide[..., 1:]

    odd = spec.operand_loads is Loads.ELEMENT
    shape, gap = (slots, H, P, N), 1 if spec.state_loads is Loads.ELEMENT else 0
    state = torch.empty_strided(shape, (H * P * N + gap, P * N, N, 1), dtype=TORCH_DTYPES[spec.state])
    state.copy_(randn(spec.state, *shape))

    decay = -(torch.rand(H, 1 if spec.tied else P, 1 if spec.tied else N, generator=g) + 0.1).to(TORCH_DTYPES[spec.A])
    if odd and not spec.tied:
        decay = torch.nn.functional.pad(decay, (1, 0))[..., 1:]
    step = randn(spec.dt, B, H, 1 if spec.tied else P)
    made = {
        "state": state,
        "x": randn(spec.x, B, H, P),
        "dt": step.expand(B, H, P) if spec.tied else step,
        "A": decay.expand(H, P, N) if spec.tied else decay,
        "B": randn(spec.B, B, G, N, odd=odd),
        "C": randn(spec.C, B, G, N, odd=odd),
        "D": spec.D and randn(spec.D, H, P),
        "z": spec.z and randn(spec.z, B, H, P),
        "dt_bias": spec.dt_bias and randn(spec.dt_bias, H, 1 if spec.tied else P).expand(H, P),
        "out": torch.full((B, H, P), float("nan"), dtype=TORCH_DTYPES[spec.out]),
    }
    if spec.index is not Index.NONE:
        order = torch.randperm(slots, generator=g).to(torch.int32 if spec.index is Index.I32 else torch.int64)
        source = order[:B].clone()
        if B > 1:
            source[1] = -1
        made["state_indices"] = source
        if spec.pool is PoolMode.SPLIT:
            made["dst_state_indices"] = torch.where(source < 0, source, order[B : 2 * B])
    return {name: t for name, t in made.items() if t is not None}
