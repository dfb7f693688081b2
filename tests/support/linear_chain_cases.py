"""Runs the second kernel of chunk_linear_attention alone, in the emulator, on prompts whose chunk images are made here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from chain_cases import BOUND, F64, NAMES, SM80, SM90, written_by
from linear_images import decays_of, images_of, operands_of, pack
from ssu_cases import BF16, F16, F32
from torch import Tensor

from ssmgen.compile.render import render
from ssmgen.emulator import run_source
from ssmgen.engine.chunks.kernels import Counts
from ssmgen.engine.tiles import maps
from ssmgen.families.chunk_linear_attention.chain import ChainSpec
from ssmgen.families.chunk_linear_attention.problem import ImageProblem, Rule, chunks_of
from ssmgen.spec.arguments import Arguments, Value
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Pdl

__all__ = ["BF16", "BOUND", "F16", "F32", "SM80", "SM90"]

PER_TOKEN = ("q", "k", "v", "read", "write", "gk", "beta")


@dataclass(frozen=True)
class Prompt:
    """Packed sequences. q, k, read, write: [tokens, HK, K]; v: [tokens, HV, V]; gk: natural logs of decays, [tokens, HV, K] float64;
    beta: [tokens, HV]. Operands that the rule does not use are None."""

    rule: Rule
    q: Tensor
    k: Tensor
    v: Tensor
    gk: Tensor
    lengths: tuple[int, ...]
    read: Tensor | None = None
    write: Tensor | None = None
    beta: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name in PER_TOKEN if (t := getattr(self, name)) is not None}

    def span(self, begin: int, end: int) -> Prompt:
        """Some of its tokens, as one sequence."""
        return replace(self, lengths=(end - begin,), **{name: t[begin:end] for name, t in self.tensors().items()})

    def spans(self) -> list[tuple[int, int]]:
        ends = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        return list(pairwise(ends))

    @property
    def problem(self) -> ImageProblem:
        return ImageProblem(**self.kind)

    @property
    def kind(self) -> dict[str, Any]:
        """The fields of a spec that the images depend on."""
        return {
            "head_k": self.q.shape[2], "rule": self.rule, "x": NAMES[self.q.dtype], "gk": DType.F32,
            "beta": None if self.beta is None else DType.F32, "read": self.read is not None, "write": self.write is not None,
        }  # fmt: skip


def prompt(
    *lengths: int,
    rule: Rule = Rule.DELTA,
    K: int = 32,
    V: int = 32,
    HK: int = 1,
    HV: int = 1,
    x: torch.dtype = BF16,
    decay: float = 0.1,
    near: float = 0.0,
    seed: int = 0,
) -> Prompt:
    """decay: of a token's channel of the state, about, as a log. Keys are of length one; near: they are one key and this much noise (0: all
    noise)."""
    g, tokens = torch.Generator().manual_seed(seed), sum(lengths)

    def randn(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=g)

    common = torch.randn(HK, K, generator=g)

    def unit(near: float = near) -> Tensor:
        t = common + near * randn(HK, K) if near else randn(HK, K)
        return (t / t.norm(dim=-1, keepdim=True)).to(x)

    q, k, v, gk = unit(0), unit(), randn(HV, V).to(x), -decay * randn(HV, K).double().exp()
    more: dict[str, Tensor] = {}
    if rule is Rule.LOW_RANK:
        read = unit()
        more = {"read": read, "write": (-read.double() * randn(HK, K).double().sigmoid()).to(x)}
    elif rule.reads:
        more = {"beta": randn(HV).double().sigmoid()} | ({"read": unit()} if rule is Rule.OLD else {})
    return Prompt(rule, q, k, v, gk, lengths, **more)


def hard(kind: str, *lengths: int, **more: Any) -> Prompt:
    """Data by whose kind errors grow, or exponents."""
    p = prompt(*lengths, **more | ({"near": 0.05, "decay": 1e-3} if kind.startswith("near") else {}))
    gk = {
        "no decay": torch.zeros_like(p.gk), "all by -5": torch.full_like(p.gk, -5.0), "strong": torch.full_like(p.gk, -40.0),
        "one never": torch.full_like(p.gk, -1.0).index_fill(2, torch.tensor([3]), 0.0),
    }.get(kind, p.gk)  # fmt: skip
    return replace(p, gk=gk, beta=torch.ones_like(p.beta) if kind == "near, beta 1" and p.beta is not None else p.beta)


HARD = ("near keys", "no decay", "all by -5", "one never", "strong", "near, beta 1")


def _views(p: Prompt) -> dict[str, Tensor]:
    return {name: t.unsqueeze(0) for name, t in p.tensors().items()} | {"cu_seqlens": torch.tensor([0, *p.lengths]).cumsum(0)}


def recurrence(p: Prompt, before: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """(out, states after each sequence) in float64, token by token: states are [HV, V, K]."""
    views = _views(p)
    *operands, weight = operands_of(views, p.problem, 1.0)
    operands[2] = operands[2] * weight[..., None]
    q, e, w, second = (t[0][:, :, None] for t in operands)
    a, v = decays_of(views, p.problem, 0.0)[0][:, :, None], p.v.double()[..., None]
    out, states = torch.zeros(p.v.shape, dtype=F64), []
    for i, (begin, end) in enumerate(p.spans()):
        S = torch.zeros(*p.v.shape[1:], p.q.shape[2], dtype=F64) if before is None else before[i].double()
        for t in range(begin, end):
            old, S = S, S * a[t]
            if p.rule.reads:
                u = -((S if p.rule is Rule.DELTA else old) * e[t]).sum(-1, keepdim=True)
                S = S + (v[t] * w[t] + u * second[t] if p.rule is Rule.LOW_RANK else (v[t] + u) * w[t])
            else:
                S = S + v[t] * w[t]
            out[t] = (S * q[t]).sum(-1)
        states.append(S)
    return out, states


def images(p: Prompt) -> Tensor:
    """[numbers, HV, bytes]: the images of a prompt's chunks; NaN in images that belong to no chunk and in unused bytes."""
    return pack(images_of(_views(p), p.problem), p.problem).view(-1, p.v.shape[1], p.problem.image.bytes)


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
    named: dict[str, Tensor] = {"images": images(p), "v": p.v, "out": torch.full_like(p.v, 7.0)}
    if batch:
        named |= {name: named[name].unflatten(0, (count, -1)) for name in ("v", "out")}
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


_DIMENSIONS = {"slot": 0, "position": 0, "sequence": 0, "batch": 0, "token": -3}


def walked(
    p: Prompt,
    *,
    make: Callable[..., Any] = ChainSpec,
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
        **p.kind | {
            "head_v": V, "state": NAMES[state], "layout": layout, "cu_seqlens": index("cu_seqlens"),
            "initial": "initial_states" in named, "final": "final_states" in named, "pool": "state" in named,
            "started": "has_initial_state" in named, "index": index("state_indices"), "checkpoints": index("checkpoint_positions"),
            "tile": 16, "pdl": Pdl.TRIGGER_LOADED if arch >= SM90 else Pdl.OFF,
        } | how
    )  # fmt: skip
    values: dict[str, Value] = {"tokens": tokens // count if batch else tokens, "sequences": count, "heads": HV, "group_heads": 1}
    values |= {"pad_slot_id": pad_slot_id, "slots": len(named.get("state", ())), "positions": len(positions or ())}
    for role, axis, _ in spec.table.strides(spec):
        dimension = (-2 if role in ("v", "out") else 1) if axis == "head" else _DIMENSIONS[axis]
        values[f"{role}_{axis}"] = named[role].stride(dimension)
    values |= maps({n: named[n] if named[n].dim() == 4 else named[n].unsqueeze(0) for n in spec.mapped}, spec.mapped, p.rule.tokens)
    packed = Arguments(spec, values).at([named[role].data_ptr() for role in spec.roles()])
    operands = {role: named[role] for role in spec.roles()}
    grid = spec.blocks(Counts(chunks_of(tokens, count, p.rule), count, HV, 1))
    if grid:
        source = change(render(spec, arch))
        launch = spec.name, grid, spec.threads_per_block, packed, operands, written_by(spec), spec.dynamic_bytes
        run_source(source, *launch, early=spec.early_operands())
    return {name: named[name] for name in spec.roles() if name in written_by(spec)}


def poisoned(p: Prompt, begin: int, end: int) -> Prompt:
    """NaN in all tokens but these."""
    kept = torch.zeros(len(p.q), dtype=torch.bool)
    kept[begin:end] = True
    return replace(p, v=torch.where(kept[:, None, None], p.v, torch.nan), q=torch.where(kept[:, None, None], p.q, torch.nan))
