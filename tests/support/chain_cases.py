"""Runs the second kernel of chunk_delta_rule alone, in the emulator, on prompts whose chunk images are made here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from delta_images import images_of, pack
from ssu_cases import BF16, F16, F32
from torch import Tensor

from ssmgen.compile.render import render
from ssmgen.emulator import run_source
from ssmgen.engine.chunks.kernels import Counts
from ssmgen.engine.chunks.problem import CHUNK
from ssmgen.engine.tiles import maps
from ssmgen.families.chunk_delta_rule.chain import ChainSpec
from ssmgen.families.chunk_delta_rule.planning import Options
from ssmgen.families.chunk_delta_rule.problem import IMAGE, chunks_of
from ssmgen.spec.arguments import Arguments, Value
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Pdl

SM80, SM90 = Arch.parse("sm_80"), Arch.parse("sm_90a")
F64 = torch.float64
NAMES = {F32: DType.F32, BF16: DType.BF16, F16: DType.F16}
BOUND = 6e-3  # relative L2 error of out and of states, of random data


@dataclass(frozen=True)
class Prompt:
    """Packed sequences. q, k: [tokens, HK, K], v: [tokens, HV, V]; decays (log2) and beta: [tokens, HV] float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    decays: Tensor
    beta: Tensor
    lengths: tuple[int, ...]

    def span(self, begin: int, end: int) -> Prompt:
        """Some of its tokens, as one sequence."""
        parts = {name: getattr(self, name)[begin:end] for name in ("q", "k", "v", "decays", "beta")}
        return Prompt(**parts, lengths=(end - begin,))

    def spans(self) -> list[tuple[int, int]]:
        ends = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        return list(pairwise(ends))


def prompt(
    *lengths: int, K: int = 32, V: int = 32, HK: int = 1, HV: int = 1, x: torch.dtype = BF16, decay: float = 0.1, seed: int = 0
) -> Prompt:
    """decay: of a token's state, about, as a log2."""
    g, tokens = torch.Generator().manual_seed(seed), sum(lengths)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    q, k, v = (randn(tokens, *shape).to(x) for shape in ((HK, K), (HK, K), (HV, V)))
    return Prompt(q, k, v, -decay * randn(tokens, HV).double().exp(), randn(tokens, HV).double().sigmoid(), lengths)


def unit(t: Tensor) -> Tensor:
    t = t.double()
    return t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(p: Prompt, before: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """(out, states after each sequence) in float64, token by token: states are [HV, V, K]."""
    group = p.v.shape[1] // p.q.shape[1]
    q, k = (unit(t).repeat_interleave(group, 1) for t in (p.q, p.k))
    out, states = torch.zeros(p.v.shape, dtype=F64), []
    for i, (begin, end) in enumerate(p.spans()):
        S = torch.zeros(p.v.shape[1], p.v.shape[2], q.shape[2], dtype=F64) if before is None else before[i].double()
        for t in range(begin, end):
            S = S * torch.exp2(p.decays[t])[:, None, None]
            fresh = p.beta[t][:, None] * (p.v[t].double() - (S * k[t][:, None]).sum(-1))
            S = S + fresh[..., None] * k[t][:, None]
            out[t] = (S * q[t][:, None]).sum(-1)
        states.append(S)
    return out, states


def images(p: Prompt) -> Tensor:
    """[numbers, HV, IMAGE] bytes: the images of a prompt's chunks; NaN in images that belong to no chunk."""
    views = {"q": p.q, "k": p.k, "v": p.v, "g": p.decays * math.log(2), "beta": p.beta}
    views = {name: t.unsqueeze(0) for name, t in views.items()} | {"cu_seqlens": torch.tensor([0, *p.lengths]).cumsum(0)}
    made = images_of(views, Options(gate="log", l2norm=True))
    return pack(made, p.q.dtype).view(-1, p.v.shape[1], IMAGE)


Make = Callable[..., Any]
_DIMENSIONS = {"slot": 0, "position": 0, "sequence": 0, "batch": 0, "token": -3}


def _operands(
    p: Prompt,
    inner: tuple[int, ...],
    batch: bool,
    before: Tensor | None,
    state: torch.dtype,
    pool: Mapping[str, Tensor] | None,
    positions: Sequence[int] | None,
) -> dict[str, Tensor]:
    """Operands of a launch, as `walked` says; inner: axes of a state. Outputs are filled with sevens."""
    count = len(p.lengths)
    named: dict[str, Tensor] = {"images": images(p), "q": p.q, "k": p.k, "v": p.v, "out": torch.full_like(p.v, 7.0)}
    if batch:
        named |= {name: t.unflatten(0, (count, -1)) for name, t in named.items() if name != "images"}
    else:
        named["cu_seqlens"] = torch.tensor([0, *p.lengths]).cumsum(0).int()
    if before is not None:
        named["initial_states"] = before
    if pool is None:
        named["final_states"] = torch.full((count, *inner), 7.0, dtype=state)
    if positions is not None:
        named["checkpoint_positions"] = torch.tensor(positions, dtype=torch.int64)
        named["checkpoints"] = torch.full((len(positions), *inner), 7.0, dtype=state)
    return named | dict(pool or {})


def walked(
    p: Prompt,
    *,
    make: Make = ChainSpec,
    arch: Arch = SM90,
    batch: bool = False,
    before: Tensor | None = None,
    state: torch.dtype = F32,
    layout: Layout = Layout.VK,
    pool: Mapping[str, Tensor] | None = None,
    positions: Sequence[int] | None = None,
    given: Mapping[str, Tensor] | None = None,
    pad_slot_id: int = -1,
    change: Callable[[str], str] = str,
    **how: Any,
) -> dict[str, Tensor]:
    """The outputs of a launch: out, and final_states or the pool's state, and checkpoints.

    make: the class of the spec; `how` adds fields that do not follow from the operands. batch: sequences of equal length form a batch axis.
    before: initial states. pool: `state`, with optional `state_indices` and `has_initial_state`. positions: of checkpoints. given: operands
    that replace the ones made here. change: edits the kernel's text.
    """
    tokens, (HV, V), K, count = len(p.v), p.v.shape[1:], p.q.shape[2], len(p.lengths)
    inner = (HV, V, K) if layout is Layout.VK else (HV, K, V)
    named = _operands(p, inner, batch, before, state, pool, positions) | dict(given or {})

    def index(name: str) -> Index:
        return {torch.int32: Index.I32, torch.int64: Index.I64}[named[name].dtype] if name in named else Index.NONE

    spec = make(
        **{
            "head_k": K, "head_v": V, "x": NAMES[p.q.dtype], "state": NAMES[state], "layout": layout, "cu_seqlens": index("cu_seqlens"),
            "initial": "initial_states" in named, "final": "final_states" in named, "pool": "state" in named,
            "started": "has_initial_state" in named, "index": index("state_indices"), "checkpoints": index("checkpoint_positions"),
            "tile": 16, "pdl": Pdl.TRIGGER_LOADED if arch >= SM90 else Pdl.OFF,
        } | how
    )  # fmt: skip
    values: dict[str, Value] = {
        "tokens": tokens // count if batch else tokens,
        "sequences": count,
        "heads": HV,
        "group_heads": HV // p.q.shape[1],
    }
    values |= {"pad_slot_id": pad_slot_id, "slots": len(named.get("state", ())), "positions": len(positions or ())}
    for role, axis, _ in spec.table.strides(spec):
        t = named[role]
        dimension = (-2 if t.dtype == p.q.dtype and role in ("q", "k", "v", "out") else 1) if axis == "head" else _DIMENSIONS[axis]
        values[f"{role}_{axis}"] = t.stride(dimension)
    values |= maps({n: named[n] if named[n].dim() == 4 else named[n].unsqueeze(0) for n in spec.mapped}, spec.mapped, CHUNK)
    packed = Arguments(spec, values).at([named[role].data_ptr() for role in spec.roles()])
    operands = {role: named[role] for role in spec.roles()}
    grid = spec.blocks(Counts(chunks_of(tokens, count), count, HV, HV // p.q.shape[1]))
    if grid:
        source = change(render(spec, arch))
        launch = spec.name, grid, spec.threads_per_block, packed, operands, written_by(spec), spec.dynamic_bytes
        run_source(source, *launch, early=spec.early_operands())
    return {name: named[name] for name in spec.roles() if name in written_by(spec)}


def written_by(spec: Any) -> tuple[str, ...]:
    """Operands that a kernel writes, as it calls them."""
    return tuple(p.name for p in spec.parameters() if p.code == "Q" and not p.ctype.startswith("const"))


def poisoned(p: Prompt, begin: int, end: int) -> Prompt:
    """NaN in all tokens but these."""
    kept = torch.zeros(len(p.q), dtype=torch.bool)
    kept[begin:end] = True
    return replace(p, **{n: torch.where(kept[:, None, None], t, torch.nan) for n, t in (("q", p.q), ("k", p.k), ("v", p.v))})
