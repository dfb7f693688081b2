"""Runs the second kernel of chunk_delta_rule or chunk_linear_attention alone, in the emulator, on prompts whose chunk images are made
here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import delta_images
import linear_images
import torch
from emulated_calls import SM90, written_by
from scan_cases import error
from ssu_cases import BF16, F16, F32
from torch import Tensor

from ssmgen.compile.render import render
from ssmgen.emulator import run_source
from ssmgen.engine.chunks.chain import Backend
from ssmgen.engine.chunks.kernels import Counts
from ssmgen.engine.chunks.problem import chunks_of
from ssmgen.engine.tiles import maps
from ssmgen.families.chunk_delta_rule.chain import ChainSpec as DeltaChain
from ssmgen.families.chunk_delta_rule.planning import Options
from ssmgen.families.chunk_linear_attention.chain import ChainSpec as LinearChain
from ssmgen.families.chunk_linear_attention.problem import ImageProblem, Rule
from ssmgen.spec.arguments import Arguments, Value
from ssmgen.spec.kernel import Arch, DType, Index, Layout, Pdl

NAMES = {F32: DType.F32, BF16: DType.BF16, F16: DType.F16}
BOUND = 6e-3  # relative L2 error of out and of states, of random data
PER_TOKEN = ("q", "k", "v", "read", "write", "log", "beta")
HEADS = None  # the rule of chunk_delta_rule, whose decays are per head
RULES = (HEADS, *Rule)


def called(rule: Rule | None) -> str:
    return "head decay" if rule is HEADS else rule.value


@dataclass(frozen=True)
class Prompt:
    """Packed sequences. q, k, read, write: [tokens, HK, K]; v: [tokens, HV, V]; log: natural logs of decays, [tokens, HV, K] or, for
    chunk_delta_rule, [tokens, HV] float64; beta: [tokens, HV]. Operands that the rule does not use are None."""

    rule: Rule | None
    q: Tensor
    k: Tensor
    v: Tensor
    log: Tensor
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
    def step(self) -> int:
        """Tokens of a chunk."""
        return (self.rule or Rule.DELTA).tokens

    @property
    def views(self) -> dict[str, Tensor]:
        """A call's views, as a batch of one."""
        named = {("gk" if name == "log" and self.rule else name): t.unsqueeze(0) for name, t in self.tensors().items()}
        named |= {"g": named.pop("log")} if "log" in named else {}
        return named | {"cu_seqlens": torch.tensor([0, *self.lengths]).cumsum(0)}

    @property
    def problem(self) -> ImageProblem:
        """Its images' problem; of chunk_delta_rule, one with the same recurrence."""
        return ImageProblem(**self.kind) if self.rule else ImageProblem(**self.kind, g=DType.F32, beta=DType.F32, l2norm=True)

    @property
    def kind(self) -> dict[str, Any]:
        """The fields of a spec that follow from the operands per token."""
        kind = {"head_k": self.q.shape[2], "x": NAMES[self.q.dtype]}
        if self.rule is HEADS:
            return kind
        return kind | {
            "rule": self.rule, "gk": DType.F32, "beta": None if self.beta is None else DType.F32, "read": self.read is not None,
            "write": self.write is not None,
        }  # fmt: skip

    @property
    def spec(self) -> Any:
        return LinearChain if self.rule else DeltaChain


def prompt(
    *lengths: int,
    rule: Rule | None = HEADS,
    K: int = 32,
    V: int = 32,
    HK: int = 1,
    HV: int = 1,
    x: torch.dtype = BF16,
    decay: float = 0.1,
    near: float = 0.0,
    seed: int = 0,
) -> Prompt:
    """decay: of a token's state, about, as a log. Keys have length one, except for chunk_delta_rule,
    whose images normalise them. near: keys are one key and this much noise (0: all noise)."""
    g, tokens = torch.Generator().manual_seed(seed), sum(lengths)

    def randn(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=g)

    common = torch.randn(HK, K, generator=g)

    def keys(near: float = near) -> Tensor:
        t = common + near * randn(HK, K) if near else randn(HK, K)
        return (t / t.norm(dim=-1, keepdim=True) if rule else t).to(x)

    q, k, v = keys(0), keys(), randn(HV, V).to(x)
    log = -decay * randn(*((HV, K) if rule else (HV,))).double().exp()
    more: dict[str, Tensor] = {}
    if rule is Rule.LOW_RANK:
        read = keys()
        more = {"read": read, "write": (-read.double() * randn(HK, K).double().sigmoid()).to(x)}
    elif rule is HEADS or rule.reads:
        more = {"beta": randn(HV).double().sigmoid()} | ({"read": keys()} if rule is Rule.OLD else {})
    return Prompt(rule, q, k, v, log, lengths, **more)


def hard(kind: str, *lengths: int, **more: Any) -> Prompt:
    """Data by whose kind errors grow, or exponents."""
    p = prompt(*lengths, **more | ({"near": 0.05, "decay": 1e-3} if kind.startswith("near") else {}))
    log = {
        "no decay": torch.zeros_like(p.log), "all by -5": torch.full_like(p.log, -5.0), "strong": torch.full_like(p.log, -40.0),
        "one never": torch.full_like(p.log, -1.0).index_fill(2, torch.tensor([3]), 0.0) if p.rule else p.log,
    }.get(kind, p.log)  # fmt: skip
    steps = {"near, beta 1": 1.0, "beta 2": 1.99}.get(kind)
    return replace(p, log=log, beta=p.beta if steps is None or p.beta is None else torch.full_like(p.beta, steps))


HARD = ("near keys", "no decay", "all by -5", "one never", "strong", "near, beta 1", "beta 2")


def states_of(p: Prompt, dtype: torch.dtype = F32, count: int | None = None) -> Tensor:
    """Random states for each sequence, or for `count` of them."""
    shape = len(p.lengths) if count is None else count, p.v.shape[1], p.v.shape[2], p.q.shape[2]
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def recurrence(p: Prompt, before: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """(out, states after each sequence) in float64, token by token: states are [HV, V, K]."""
    *operands, weight = linear_images.operands_of(p.views, p.problem, 1.0)
    operands[2] = operands[2] * weight[..., None]
    q, e, w, second = (t[0][:, :, None] for t in operands)
    a, v = linear_images.decays_of(p.views, p.problem, 0.0)[0][:, :, None], p.v.double()[..., None]
    out, states = torch.zeros(p.v.shape, dtype=torch.float64), []
    for i, (begin, end) in enumerate(p.spans()):
        S = torch.zeros(*p.v.shape[1:], p.q.shape[2], dtype=torch.float64) if before is None else before[i].double()
        for t in range(begin, end):
            old, S = S, S * a[t]
            if p.problem.rule.reads:
                u = -((S if p.problem.rule is Rule.DELTA else old) * e[t]).sum(-1, keepdim=True)
                S = S + (v[t] * w[t] + u * second[t] if p.rule is Rule.LOW_RANK else (v[t] + u) * w[t])
            else:
                S = S + v[t] * w[t]
            out[t] = (S * q[t]).sum(-1)
        states.append(S)
    return out, states


def images(p: Prompt) -> Tensor:
    """[numbers, HV, bytes]: the images of a prompt's chunks; NaN in images that belong to no chunk and in unused bytes."""
    if p.rule is HEADS:
        made = delta_images.pack(delta_images.images_of(p.views, Options(gate="log", l2norm=True)), p.q.dtype)
        return made.view(-1, p.v.shape[1], delta_images.IMAGE)
    return linear_images.pack(linear_images.images_of(p.views, p.problem), p.problem).view(-1, p.v.shape[1], p.problem.image.bytes)


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


_DIMENSIONS = {"slot": 0, "position": 0, "sequence": 0, "batch": 0, "token": -3}


def walked(
    p: Prompt,
    *,
    backend: Backend = Backend.WARPS,
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

    `how` adds fields of the spec that do not follow from the operands. batch: sequences of equal length form a batch axis. before: initial
    states. pool: `state`, with optional `state_indices` and `has_initial_state`. positions: of checkpoints. given: operands that replace
    others. change: edits the kernel's text.
    """
    tokens, (HV, V), K, count = len(p.v), p.v.shape[1:], p.q.shape[2], len(p.lengths)
    inner = (HV, V, K) if layout is Layout.VK else (HV, K, V)
    named = _operands(p, inner, batch, before, state, pool, positions) | dict(given or {})
    make = p.spec if backend is Backend.WARPS else p.spec.by_warpgroups

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
    counts = Counts(chunks_of(tokens, count, p.problem.rule.tokens), count, HV, HV // p.q.shape[1])
    values: dict[str, Value] = {"tokens": tokens // count if batch else tokens, "sequences": count, "heads": HV}
    values |= {"group_heads": counts.group_heads, "pad_slot_id": pad_slot_id}
    values |= {"slots": len(named.get("state", ())), "positions": len(positions or ())}
    for role, axis, _ in spec.table.strides(spec):
        dimension = (-2 if role in ("q", "k", "v", "out") else 1) if axis == "head" else _DIMENSIONS[axis]
        values[f"{role}_{axis}"] = named[role].stride(dimension)
    values |= maps({n: named[n] if named[n].dim() == 4 else named[n].unsqueeze(0) for n in spec.mapped}, spec.mapped, p.step)
    packed = Arguments(spec, values).at([named[role].data_ptr() for role in spec.roles()])
    operands = {role: named[role] for role in spec.roles()}
    grid = spec.blocks(counts)
    if grid:
        source = change(render(spec, arch))
        launch = spec.name, grid, spec.threads_per_block, packed, operands, written_by(spec), spec.dynamic_bytes
        run_source(source, *launch, early=spec.early_operands())
    return {name: named[name] for name in spec.roles() if name in written_by(spec)}


def accurate(found: Mapping[str, Tensor], p: Prompt, before: Tensor | None = None, bound: float = BOUND) -> bool:
    """Whether out and final states equal float64 results within `bound`."""
    out, states = recurrence(p, before)
    return error(found["out"], out) <= bound and error(found["final_states"], torch.stack(states)) <= bound


def poisoned(p: Prompt, begin: int, end: int) -> Prompt:
    """NaN in all tokens but these."""
    kept = torch.zeros(len(p.q), dtype=torch.bool)
    kept[begin:end] = True
    return replace(p, **{n: torch.where(kept[:, None, None], t, torch.nan) for n, t in (("q", p.q), ("k", p.k), ("v", p.v))})
