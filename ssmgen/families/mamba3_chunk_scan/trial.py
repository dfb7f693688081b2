"""Trials of mamba3_chunk_scan: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.chunks.trial import rows, tokens_of
from ...engine.trial import Trial, boundaries, slot_indices, trial, wide
from ...spec.kernel import DType, Index, KernelSpec, Loads
from .operands import OPERANDS
from .planning import CALLER
from .prepare import words_of
from .problem import Mamba3PromptProblem
from .roles import Mamba3RolesSpec
from .spec import Mamba3ScanSpec
from .views import Options
from .warpgroups import Mamba3WarpgroupsSpec

HEADS, GROUPS = 2, 1
# More than one rounding's norm error: rows, states, M and additions to states are each rounded before a product.
SLACK = {DType.BF16: 5e-3, DType.F16: 8e-4}
ANGLES = 1e-5  # of f32 sums of tens of tokens, in radians; angles are up to pi


def operands(spec: Mamba3PromptProblem, kernels: Sequence[KernelSpec], batch: int, seed: int, tokens: int = 0) -> dict[str, Tensor]:
    """Sequences longer than two chunks; packed ones also shorter, of one token and without tokens."""
    g = torch.Generator().manual_seed(seed)
    longest = spec.segments * spec.chunk + 5 if spec.segments > 1 else 0  # of all its parts
    H, P, N, G, R, n = HEADS, spec.headdim, spec.d_state, GROUPS, spec.rank, spec.angles
    lead, counts = tokens_of(spec, batch, max(2 * spec.chunk + 5, longest, tokens), spec.chunk)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    def weight(values: Tensor, dtype: DType | None) -> Tensor | None:
        return None if dtype is None else wide(values, dtype, False)

    made: dict[str, Tensor | None] = {"x": rows(spec, lead, H, P, g), "z": rows(spec, lead, H, P, g)}
    made |= {name: rows(spec, (*lead, R), G, N, g) for name in ("B", "C")}
    made["out"] = torch.full_like(rows(spec, (*lead, R) if spec.by_rank else lead, H, P, g), math.nan)
    made["A"] = wide(randn(*lead, H) if spec.rate.raw else -torch.rand(*lead, H, generator=g) - 0.1, spec.A, False)
    made["dt"] = wide(randn(*lead, H) if spec.dt_softplus else torch.rand(*lead, H, generator=g), spec.dt, True)
    made["trap"] = wide(randn(*lead, H) if spec.trap_sigmoid else torch.rand(*lead, H, generator=g), spec.trap, False)
    if spec.angle is not None:
        made["angle"] = wide(randn(*lead, n), spec.angle, True).unsqueeze(-2).expand(*lead, H, n)
    bias = randn(H) if spec.dt_softplus else torch.rand(H, generator=g)  # dt stays positive
    made |= {"D": weight(randn(H), spec.D), "dt_bias": weight(bias, spec.dt_bias)}
    made |= {name: weight(1 + randn(N) / 4, spec.row_norm) for name in ("B_norm", "C_norm")}
    made |= {name: weight(1 + randn(H, R, N), spec.row_bias) for name in ("B_bias", "C_bias")}
    made |= {name: weight(1 + randn(H, R, P) / 2, spec.mimo) for name in ("mimo_x", "mimo_z", "mimo_o")}
    made["norm_weight"] = weight(1 + randn(H, P) / 4, spec.norm_weight)
    if spec.ragged:
        made["cu_seqlens"] = boundaries(counts, spec.cu_seqlens)
    made["has_initial_state"] = torch.arange(batch) % 3 == 0
    slots = batch if spec.index is Index.NONE else 3 * batch
    if spec.index is not Index.NONE:
        made["state_indices"] = slot_indices(spec.index, batch, slots, g)
    for names, count in ((("initial_states", "initial_k", "initial_v", "initial_angles"), batch), (_POOLS, slots)):
        made |= dict(zip(names, _states(spec, count, g), strict=True))
    made["workspace"] = torch.full((words_of(n, lead[0] * lead[1], batch, H, G),), math.nan)
    taken = {name for part in kernels for name in part.operands()}
    return {name: t for name in OPERANDS.names if name in taken and (t := made[name]) is not None}


_POOLS = ("state", "k_state", "v_state", "angle_state")


def _states(spec: Mamba3PromptProblem, count: int, g: Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S, k, v and angles. Pairs of S are aligned, or begin at odd places; angles are of many turns, and negative."""
    odd, size = spec.state_loads is Loads.ELEMENT, HEADS * spec.headdim * spec.d_state
    S = torch.randn(count, size + (1 if odd else 2), generator=g).to(TORCH_DTYPES[spec.state])
    S = S[:, 1 if odd else 0 :][:, :size].view(count, HEADS, spec.headdim, spec.d_state)
    k = wide(torch.randn(count, spec.rank, HEADS, spec.d_state, generator=g), spec.k_state, False)
    v = wide(torch.randn(count, HEADS, spec.headdim, generator=g), spec.v_state, True)
    angles = wide(20 * torch.randn(count, HEADS, spec.angles, generator=g), DType.F32, False)
    return S, k, v, angles


def mamba3_chunk_scan(spec: Mamba3ScanSpec, batch: int, seed: int, tokens: int = 0) -> Trial:
    named = operands(spec, spec.kernels, batch, seed, tokens)
    if not spec.by_rank and spec.rank == 1 and not spec.mimo:
        named |= {name: named[name].squeeze(2) for name in ("B", "C")}
    options = Options(spec.rate.value, spec.rotary.value, spec.dt_softplus, spec.trap_sigmoid, final=spec.final, segments=spec.segments)
    slack = dict.fromkeys(CALLER.family.written, SLACK[spec.x]) | {"angle_state": ANGLES}
    between = ("workspace",) if spec.prepared else ()
    return trial(CALLER, named, options, slack=slack, between=between)


KINDS = (Mamba3ScanSpec, Mamba3RolesSpec, Mamba3WarpgroupsSpec)
TRIALS: dict[type[Mamba3ScanSpec], Callable[..., Trial]] = dict.fromkeys(KINDS, mamba3_chunk_scan)
