"""Operands for causal_conv1d and causal_conv1d_update: strided, poisoned, guarded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from guarded_call import GuardedCall
from ssu_cases import BF16, Memory
from torch import Tensor

from ssmgen.families.causal_conv1d import call as forward_op
from ssmgen.families.causal_conv1d_update import call as update_op
from ssmgen.families.causal_conv1d_update.operands import CHILDREN
from ssmgen.families.causal_conv1d_update.spec import Advance

I32, I64 = torch.int32, torch.int64
SHIFT, ROLL, RING = Advance.SHIFT, Advance.ROLL, Advance.RING


@dataclass(frozen=True)
class Case:
    """One point of the matrix of whole sequences; `id` is readable."""

    id: str
    layout: str = "first"  # see LAYOUTS
    width: int = 4
    dim: int = 12
    batch: int = 2
    length: int = 600  # beyond one warp's piece
    lengths: tuple[int, ...] = ()  # packed sequences, as [dim, tokens]
    three: bool = False  # those as [1, dim, tokens]
    x: torch.dtype = BF16
    weight: torch.dtype = BF16
    bias: torch.dtype | None = BF16
    taps: str = "dense"  # odd, transposed
    silu: bool = True
    scale: float = 1.0  # of x
    out: str = ""  # a layout; empty: the layout of x
    seq_idx: bool = False
    initial: bool = False
    final: str = ""  # new; in_place: in initial_states
    pool: bool = False
    started: bool = False
    index: torch.dtype | None = None
    starts: torch.dtype = I32
    states: str = "channels"  # the contiguous axis; or: windows, gaps
    pad_slot_id: int = -1

    @property
    def sequences(self) -> int:
        return len(self.lengths) or self.batch


@dataclass(frozen=True)
class UpdateCase:
    """One point of the matrix of decode steps."""

    id: str
    advance: Advance = SHIFT
    width: int = 4
    dim: int = 40
    batch: int = 6
    tokens: int | None = None  # None: no tokens axis
    lengths: tuple[int, ...] = ()  # packed sequences
    state: str = "windows"  # the contiguous axis; or: channels, channels_odd, any
    extra: int = 0  # entries of the state, beyond the fewest
    layout: str = "channels"  # of x: the contiguous axis; or: odd
    x: torch.dtype = BF16
    weight: torch.dtype = BF16
    bias: torch.dtype | None = BF16
    taps: str = "dense"
    silu: bool = True
    position: torch.dtype = I32
    starts: torch.dtype = I32
    index: torch.dtype | None = I32
    saved: str = ""  # the contiguous axis of the saved windows; or: odd
    saved_index: torch.dtype | None = None
    saved_tokens: int = 0  # of them, beyond or (negative) below the most
    parents: torch.dtype | None = None  # of a draft tree
    children: torch.dtype | None = None  # of one that is given by first children and next siblings
    in_place: bool = False
    out: str = ""
    pad_slot_id: int = -1

    @property
    def sequences(self) -> int:
        return len(self.lengths) or self.batch

    @property
    def longest(self) -> int:
        return max(self.lengths, default=self.tokens or 1)

    @property
    def state_len(self) -> int:
        return self.width - 1 + (self.longest - 1 if self.advance is ROLL else 0) + self.extra


FIRST, LAST = Case("first"), Case("last", layout="last", dim=40, length=70)
_KINDS = {
    "first": FIRST,
    "first-dense": replace(FIRST, layout="first_dense", length=523),
    "first-slice": replace(FIRST, layout="first_slice", length=541),
    "first-any": replace(FIRST, layout="first_any", length=517),
    "last": LAST,
    "last-slice": replace(LAST, layout="last_slice", dim=264),
    "last-odd": replace(LAST, layout="last_odd", dim=37),
    "last-any": replace(LAST, layout="last_any"),
}
KINDS = {kind: replace(case, id=kind) for kind, case in _KINDS.items()}
PACKED = (3, 0, 700, 1, 2, 530, 17)
SHORT = (3, 0, 25, 1, 2, 40, 17)
STATEFUL = {"initial": True, "final": "new"}
POOL = {"pool": True, "started": True, "index": I64}


# Where [batch, dim, length] lies: (strides, offset) of it.
LAYOUTS: dict[str, Callable[[int, int], tuple[tuple[int, int, int], int]]] = {
    "first": lambda dim, n: ((dim * (-(-n // 8) * 8), -(-n // 8) * 8, 1), 64),  # rows on the 16-byte grid
    "first_dense": lambda dim, n: ((dim * n, n, 1), 64),
    "first_slice": lambda dim, n: ((dim * (n + 13) + 3, n + 13, 1), 67),
    "first_any": lambda dim, n: ((dim * (2 * n + 1), 2 * n + 1, 2), 65),
    "last": lambda dim, n: ((n * dim, 1, dim), 64),
    "last_slice": lambda dim, n: ((n * (dim + 24), 1, dim + 24), 72),
    "last_odd": lambda dim, n: ((n * (dim + 3), 1, dim + 3), 65),
    "last_any": lambda dim, n: ((n * (2 * dim + 1), 2, 2 * dim + 1), 65),
}
LAYOUTS |= {"windows": LAYOUTS["first_dense"], "channels": LAYOUTS["last"], "odd": LAYOUTS["last_odd"], "channels_odd": LAYOUTS["last_odd"]}
LAYOUTS |= {"gaps": LAYOUTS["first_slice"], "any": LAYOUTS["first_any"]}


@dataclass
class Call(GuardedCall):
    written: dict[str, str]  # {operand: name of its buffer}

    @property
    def op(self) -> ModuleType:
        return forward_op if isinstance(self.case, Case) else update_op

    @property
    def operator(self) -> str:
        return self.op.OPERATOR


def _view(memory: Memory, name: str, layout: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """[batch, dim, length] in its buffer, unset."""
    strides, offset = LAYOUTS[layout](*shape[1:])
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=memory.device)
    return memory.view(name, shape, strides, dtype, offset)


def _weights(case: Any, memory: Memory, g: torch.Generator) -> dict[str, Tensor]:
    shape = (case.dim, case.width)
    values = torch.randn(shape, generator=g) * 0.6
    strides = (1, case.dim) if case.taps == "transposed" else (case.width, 1)
    weight = memory.view("weight", shape, strides, case.weight, 65 if case.taps == "odd" else 64)
    weight.copy_(values)
    if case.bias is None:
        return {"weight": weight}
    bias = memory.view("bias", (case.dim,), (2 if case.taps == "transposed" else 1,), case.bias, 65 if case.taps == "odd" else 64)
    bias.copy_(torch.randn(case.dim, generator=g))
    return {"weight": weight, "bias": bias}


def _slots(case: Any, memory: Memory, g: torch.Generator) -> tuple[int, list[int], dict[str, Tensor]]:
    """(size of the pool, slot of each sequence or -1, operands): sequences 1, 4 and 6 are padding, where there are slots to say so."""
    count = case.sequences
    if case.index is None:
        return count + 1, list(range(count)), {}
    slots = 2 * count + 5
    order = [s for s in torch.randperm(slots, generator=g).tolist() if s != case.pad_slot_id]
    invalid = {1: case.pad_slot_id, 4: slots + 2, 6: -5}
    chosen = [invalid.get(s, order[s]) for s in range(count)]
    indices = memory.view("conv_state_indices", (count,), (2,), case.index)
    indices.copy_(torch.tensor(chosen, dtype=case.index))
    return slots, [-1 if s in invalid else order[s] for s in range(count)], {"conv_state_indices": indices}


def _ids(case: Case, g: torch.Generator) -> Tensor:
    """Runs of some tokens each, one in six of them padding; the first row ends with padding."""
    ids = torch.full((case.batch, case.length), -1, dtype=I32)
    for b in range(case.batch):
        at = 0
        for number in range(case.length):
            run = int(torch.randint(1, 9, (1,), generator=g))
            ids[b, at : at + run] = -1 if (number + b) % 6 == 5 else number
            at += run
        if b == 0:
            ids[b, case.length - case.length // 9 :] = -1
    return ids


def make_call(case: Case, device: str, seed: int = 0) -> Call:
    """Random operands. Unused slots, padding and states that must not be read hold NaN; buffers are padded with poison."""
    g, memory = torch.Generator().manual_seed(seed), Memory(device)
    ragged, count, width = bool(case.lengths), case.sequences, case.width
    shape = (1, case.dim, sum(case.lengths)) if ragged else (case.batch, case.dim, case.length)
    x, out = (_view(memory, n, layout or case.layout, shape, case.x) for n, layout in (("x", case.layout), ("out", case.out)))
    x.copy_(torch.randn(shape, generator=g) * case.scale)
    flat = ragged and not case.three
    kwargs: dict[str, Any] = {"x": x[0] if flat else x, "out": out[0] if flat else out, **_weights(case, memory, g)}
    kwargs |= {"activation": "silu" if case.silu else None, "pad_slot_id": case.pad_slot_id}
    written = {"out": "out"}
    if case.seq_idx:
        ids = _ids(case, g)
        kwargs["seq_idx"] = memory.view("seq_idx", tuple(ids.shape), (case.length + 3, 1), I32)
        kwargs["seq_idx"].copy_(ids)
        x.transpose(1, 2)[(ids < 0).to(device)] = float("nan")
    if ragged:
        kwargs["query_start_loc"] = memory.fill("query_start_loc", torch.tensor([0, *accumulate(case.lengths)], dtype=case.starts))
    states = (count, case.dim, width - 1)
    if case.initial:
        kwargs["initial_states"] = _view(memory, "initial_states", case.states, states, case.x)
        kwargs["initial_states"].copy_(torch.randn(states, generator=g))
    if case.final:
        place = "initial_states" if case.final == "in_place" else "final_states"
        final = kwargs[place] if case.final == "in_place" else _view(memory, place, case.states, states, case.x)
        kwargs |= {"return_final_states": True, "final_states_out": final}
        written["final_states"] = place
    if case.pool:
        slots, slot_of, indices = _slots(case, memory, g)
        kwargs |= indices
        pool = kwargs["conv_states"] = _view(memory, "conv_states", case.states, (slots, case.dim, width - 1), case.x)
        pool.fill_(float("nan"))
        fresh = [s % 3 == 2 or not case.started for s in range(count)]
        for s, slot in enumerate(slot_of):
            if slot >= 0 and not fresh[s]:
                pool[slot] = torch.randn(case.dim, width - 1, generator=g).to(case.x)
        if case.started:
            kwargs["has_initial_state"] = torch.tensor([[not f, f] for f in fresh], dtype=torch.bool, device=device)[:, 0]
        written["conv_states"] = "conv_states"
    memory.seal()
    return Call(case, memory, kwargs, written)


def tree_of(tokens: int, g: torch.Generator) -> tuple[list[int], list[int]]:
    """First children and next siblings, -1 for none. Each token after the first is the child of an earlier token, or has no parent."""
    children, siblings = [-1] * tokens, [-1] * tokens
    for t in range(1, tokens):
        parent = int(torch.randint(-1, t, (1,), generator=g))
        if parent >= 0 and (at := children[parent]) < 0:
            children[parent] = t
        elif parent >= 0:
            while siblings[at] >= 0:
                at = siblings[at]
            siblings[at] = t
    return children, siblings


def make_update(case: UpdateCase, device: str, seed: int = 0) -> Call:
    """The same for decode steps; sequence 2 of a rolling window has too small a count, and sequence 5 too large a one."""
    g, memory = torch.Generator().manual_seed(seed), Memory(device)
    count, history = case.sequences, case.width - 1
    T = sum(case.lengths) if case.lengths else case.tokens or 1
    shape = (1 if case.lengths else case.batch, case.dim, T)

    def tokens(name: str, layout: str) -> Tensor:
        t = _view(memory, name, layout, shape, case.x)
        return t[0].t() if case.lengths else t[..., 0] if case.tokens is None else t

    x = tokens("x", case.layout)
    x.copy_(torch.randn(x.shape, generator=g))
    out = x if case.in_place else tokens("out", case.out or case.layout)
    slots, slot_of, kwargs = _slots(case, memory, g)
    kwargs |= {"x": x, "out": out, **_weights(case, memory, g), "pad_slot_id": case.pad_slot_id}
    kwargs["activation"] = "silu" if case.silu else None
    if case.lengths:
        kwargs["query_start_loc"] = memory.fill("query_start_loc", torch.tensor([0, *accumulate(case.lengths)], dtype=case.starts))
    state = kwargs["conv_state"] = _view(memory, "conv_state", case.state, (slots, case.dim, case.state_len), case.x)
    state.fill_(float("nan"))
    for slot in slot_of:
        if slot >= 0:
            state[slot] = torch.randn(case.dim, case.state_len, generator=g).to(case.x)
    if case.advance is ROLL:
        most = case.state_len - history + 1
        accepted = [{2: 0, 5: most + 1}.get(s, 1 + s % most) for s in range(count)]
        kwargs["num_accepted_tokens"] = memory.fill("num_accepted_tokens", torch.tensor(accepted, dtype=case.position))
    if case.advance is RING:
        seen = [(0, 5, 17, 2, 1000, 3)[s % 6] for s in range(count)]
        kwargs["cache_seqlens"] = memory.fill("cache_seqlens", torch.tensor(seen, dtype=case.position))
    if case.parents:  # the token before, the first, two back; and invalid: itself, a later one, negative
        kinds = (lambda t: t - 1, lambda t: 0, lambda t: t - 2, lambda t: t, lambda t: t + 2, lambda t: -9)
        columns = max(case.longest - (2 if case.lengths else 0), 1)
        tree = [[kinds[int(torch.randint(6, (1,), generator=g))](t) for t in range(columns)] for _ in range(count)]
        kwargs["parents"] = memory.view("parents", (count, columns), (2 * columns + 1, 2), case.parents)
        kwargs["parents"].copy_(torch.tensor(tree))
    if case.children:
        trees = [tree_of(case.longest, g) for _ in range(count)]
        made = dict(zip(CHILDREN, zip(*trees, strict=True), strict=False)) | {"parents_out": [[77] * case.longest] * count}
        kwargs |= {n: memory.view(n, (count, case.longest), (2 * case.longest + 1, 2), case.children) for n in CHILDREN}
        for name in CHILDREN:
            kwargs[name].copy_(torch.tensor(made[name]))
    if case.saved:
        rows, columns = count + 2, case.longest + case.saved_tokens
        windows = torch.full((rows, columns, case.dim, history), 3.0, dtype=case.x)
        if case.saved == "windows":
            place = memory.fill("intermediate_conv_window", windows)
        else:
            pitch = case.dim + (5 if case.saved == "odd" else 0)
            strides = (columns * history * pitch, history * pitch, 1, pitch)
            place = memory.view("intermediate_conv_window", tuple(windows.shape), strides, case.x)
            place.copy_(windows)
        kwargs["intermediate_conv_window"] = place
        if case.saved_index:
            row = [{3: -1, 5: rows}.get(s, (s + 1) % count) for s in range(count)]
            kwargs["intermediate_state_indices"] = memory.fill("intermediate_state_indices", torch.tensor(row, dtype=case.saved_index))
    memory.seal()
    written = {n: n for n in update_op.FAMILY.written if n in kwargs} | {"out": "x" if case.in_place else "out"}
    return Call(case, memory, kwargs, written)


def make(case: Any, device: str, seed: int = 0) -> Call:
    return (make_call if isinstance(case, Case) else make_update)(case, device, seed)
