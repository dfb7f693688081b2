"""Trials of selective_state_update: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.recurrences.mamba.operands import OPERANDS
from ...engine.trial import INTEGERS, Trial, boundaries, cycled, fill, ordered, scales, slot_indices, slots_of, states, trial, wide
from ...spec.kernel import DType, Index, Loads, PoolMode, Update
from .planning import CALLER, Options
from .spec import SsuSpec

LIMIT = (0.01, 0.1)  # of dt: in the middle of the range of softplus


def one_operands(spec: SsuSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Random operands of a call with one token per sequence, by name and in the kernel's order."""
    g = torch.Generator().manual_seed(seed)
    B, H, P, N, G = batch, spec.nheads, spec.headdim, spec.d_state, spec.ngroups
    slots = batch if spec.index is Index.NONE else 3 * batch

    def randn(dtype: DType, *shape: int, odd: bool = False) -> Tensor:
        values = torch.randn(*shape, generator=g).to(TORCH_DTYPES[dtype])
        if not odd:
            return values
        wide = torch.empty(*shape[:-1], shape[-1] + 1, dtype=values.dtype)  # rows that start at odd offsets
        wide[..., 1:] = values
        return wide[..., 1:]

    odd = spec.operand_loads is Loads.ELEMENT
    state = states(spec.state, (slots,), (H, P, N), 1 if spec.state_loads is Loads.ELEMENT else 0)
    fill(state, g) if spec.scaled else state.copy_(torch.randn(slots, H, P, N, generator=g))

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
        order = torch.randperm(slots, generator=g).to(INTEGERS[spec.index])
        source = order[:B].clone()
        if B > 1:
            source[1] = -1
        made["state_indices"] = source
        if spec.pool is PoolMode.SPLIT:
            made["dst_state_indices"] = torch.where(source < 0, source, order[B : 2 * B])
    if spec.philox_rounds:
        made["rand_seed"] = torch.randint(-(2**62), 2**62, (slots,), generator=g)
    if spec.scaled:
        made["state_scale"] = scales(state, g)
    return ordered(spec, made)


def tokens_operands(spec: SsuSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Random operands of a call with several tokens per sequence, more than are staged at a time."""
    g = torch.Generator().manual_seed(seed)
    H, P, N, G, most = spec.nheads, spec.headdim, spec.d_state, spec.ngroups, spec.chunk + 1
    counts = cycled((3, 2, most, 0), batch) if spec.ragged else [most] * batch
    lead = (sum(counts),) if spec.ragged else (batch, most)
    split, gap = spec.pool is PoolMode.SPLIT, 1 if spec.state_loads is Loads.ELEMENT else 16
    in_place, targets = spec.update is Update.FINAL and not split, max(counts) - spec.ragged if spec.update is Update.EACH else 0
    slots, made = slots_of(spec.index, spec.accepted, counts, g, in_place=in_place, split=split, targets=targets)
    if spec.ragged:
        made["cu_seqlens"] = boundaries(counts, spec.cu_seqlens)
    shapes = {**dict.fromkeys(("x", "z", "out"), (H, P)), **dict.fromkeys(("B", "C"), (G, N)), "dt": (H,)}
    for name in ("x", "z", "out", "B", "C", "dt"):
        if name in spec.operands():
            values = torch.randn(*lead, *shapes[name], generator=g)
            odd = name in ("B", "C") and spec.operand_loads is Loads.ELEMENT
            made[name] = wide(values, getattr(spec, name), odd, 2 if odd else 1)
    made["out"].fill_(float("nan"))
    made |= {n: torch.randn(H, generator=g).to(TORCH_DTYPES[getattr(spec, n)]) for n in ("D", "dt_bias") if n in spec.operands()}
    made["A"] = -(torch.rand(H, generator=g) + 0.1).to(TORCH_DTYPES[spec.A])
    made["state"] = state = states(spec.state, (slots,), (H, P, N), gap)
    fill(state, g)
    if spec.intermediate_states:  # one column too many; or one too few, if calls may keep fewer states than they have tokens
        columns = most + (-1 if spec.ragged else 1)
        made["intermediate_states"] = states(spec.intermediate_states, (2 * batch, columns), (H, P, N), gap).fill_(7.0)
    if spec.intermediate_indices is not Index.NONE:
        made["intermediate_state_indices"] = slot_indices(spec.intermediate_indices, batch, 2 * batch, g)
    if spec.parents is not Index.NONE:
        made["parents"] = torch.randint(-1, most, (batch, most), generator=g).to(INTEGERS[spec.parents])
    if spec.philox_rounds:
        made["rand_seed"] = torch.randint(-(2**62), 2**62, (slots,), generator=g)
    made |= {name: scales(made[of], g) for of, name in OPERANDS.scales.items() if name in spec.operands()}
    return ordered(spec, made)


def selective_state_update(spec: SsuSpec, batch: int, seed: int) -> Trial:
    update = spec.update is not Update.NONE
    how = (spec.dt_softplus, LIMIT if spec.dt_limit else None, -1)
    options = Options(*how, spec.philox_rounds, update, spec.zero_padding)
    scaled = {of: name for of, name in OPERANDS.scales.items() if name in spec.operands()}
    if not spec.several:
        return trial(CALLER, one_operands(spec, batch, seed), options, without_noise=options._replace(philox_rounds=0), scales=scaled)
    kept = () if update else ("state", "state_scale")
    return trial(CALLER, tokens_operands(spec, batch, seed), options, kept=kept, tokens=spec.chunk + 1, scales=scaled)


TRIALS = {SsuSpec: selective_state_update}
