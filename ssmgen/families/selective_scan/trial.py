"""Trials of selective_scan: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.trial import Trial, boundaries, cycled, ordered, slot_indices, trial, wide
from ...spec.kernel import DType, Index, Loads
from .planning import CALLER, Options
from .problem import Order
from .roles import RolesSpec
from .spec import SelectiveSpec

GROUPS = 2
# More than one rounding's norm error: exponentials of 2 ulp, in states that remember.
SLACK = {DType.BF16: 0.0, DType.F16: 0.0, DType.F32: 1e-5}


def operands(spec: SelectiveSpec, batch: int, seed: int, tokens: int = 0) -> dict[str, Tensor]:
    """Sequences longer than a tile, with at least `tokens` tokens, and more channels than a block; packed sequences also shorter than a
    tile, of one token and without tokens."""
    g = torch.Generator().manual_seed(seed)
    most = max(spec.tile + 5, tokens)
    counts = cycled((most, 3, 0, spec.tile, 1), batch)
    rows, length = (1, sum(counts)) if spec.ragged else (batch, most)
    dim, N = GROUPS * (spec.channels + 8), spec.d_state
    slots = batch if spec.index is Index.NONE else 3 * batch

    def along(values: Tensor, layout: Order, copy: int) -> Tensor:
        """[batch, tokens, …] with the spec's contiguous axis; with gaps, if the spec allows them."""
        one = TORCH_DTYPES[spec.x].itemsize
        turned = values.movedim(1, -1) if layout is Order.FIRST else values
        step = 2 if copy == 0 else 1
        made = wide(turned, spec.x, copy in (0, one), step)
        return made.movedim(-1, 1) if layout is Order.FIRST else made

    def plain(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    made = {name: along(plain(rows, length, dim), spec.layout, spec.copy) for name in ("u", "delta", "z")}
    if not spec.delta_softplus:
        made["delta"].abs_()
    made["A"] = -torch.exp(torch.rand(dim, N, generator=g) * 5.0 - 2.0)
    made |= {name: along(plain(rows, length, GROUPS, N), spec.key_layout, spec.key_copy) for name in ("B", "C")}
    made["out"] = along(torch.full((rows, length, dim), float("nan")), spec.layout, spec.copy)
    made |= {name: plain(dim).to(TORCH_DTYPES[dtype]) for name in ("D", "delta_bias") if (dtype := getattr(spec, name)) is not None}
    if spec.ragged:
        made["cu_seqlens"] = boundaries(counts, spec.cu_seqlens)
    counted = {"initial_states": batch, "final_states": batch, "state": slots}
    odd = spec.state_loads is Loads.ELEMENT
    made |= {name: wide(plain(count, dim, N), spec.state, odd) for name, count in counted.items()}
    if spec.index is not Index.NONE:
        made["state_indices"] = slot_indices(spec.index, batch, slots, g)
    made["has_initial_state"] = torch.arange(batch) % 3 == 0
    return ordered(spec, made)


def selective_scan(spec: SelectiveSpec, batch: int, seed: int, tokens: int = 0) -> Trial:
    slack = dict.fromkeys(CALLER.family.written, SLACK[spec.x]) | dict.fromkeys(("final_states", "state"), 1e-5)
    return trial(CALLER, operands(spec, batch, seed, tokens), Options(spec.delta_softplus), slack=slack)


TRIALS: dict[type[SelectiveSpec], Callable[..., Trial]] = {
    SelectiveSpec: selective_scan,
    RolesSpec: selective_scan,
}
