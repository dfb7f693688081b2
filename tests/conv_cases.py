"""Operands for causal_conv1d and causal_conv1d_update: strided, poisoned, guarded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from ssu_cases import BF16, F16, F32, Memory
from torch import Tensor
from varying import vary

import ssmgen
from ssmgen.families.causal_conv1d import call as forward_op
from ssmgen.families.causal_conv1d_update import call as update_op
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
    out: str = ""  # a layout; empty: that of x
    seq_idx: bool = False
    initial: bool = False
    final: str = ""  # new; in_place: in initial_states
    pool: bool = False
    started: bool = False
    index: torch.dtype | None = None
    starts: torch.dtype = I32
    states: str = "channels"  # what is contiguous; or: windows, gaps
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
    state: str = "windows"  # what is contiguous; or: channels, channels_odd, any
    extra: int = 0  # entries of the state, beyond the fewest
    layout: str = "channels"  # of x: what is contiguous; or: odd
    x: torch.dtype = BF16
    weight: torch.dtype = BF16
    bias: torch.dtype | None = BF16
    taps: str = "dense"
    silu: bool = True
    position: torch.dtype = I32
    starts: torch.dtype = I32
    index: torch.dtype | None = I32
    saved: str = ""  # what is contiguous in the windows that are saved; or: odd
    saved_index: torch.dtype | None = None
    saved_tokens: int = 0  # of them, beyond or (negative) below the most
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


def matrix() -> list[Case]:
    kinds = list(KINDS.values())
    first, first_slice, last, odd = (KINDS[k] for k in ("first", "first-slice", "last", "last-odd"))
    types = [(F32, F32, F32), (F16, F16, F16), (BF16, F32, F32), (F16, F32, BF16), (F32, BF16, None), (BF16, F16, None)]
    names = {F32: "f32", F16: "f16", BF16: "bf16", None: "none"}
    packed = {"lengths": PACKED, **POOL}
    short = {"lengths": SHORT, **POOL}
    many = (5, 1, 0, 2)
    cases = [
        *kinds,
        *[replace(c, id=f"{k}-w{w}") for k, c in KINDS.items() if k != "last-any" for w in range(1, 9) if w != 4],
        *[replace(c, id=f"{c.id}-{'-'.join(names[n] for n in t)}", x=t[0], weight=t[1], bias=t[2]) for c in kinds[::2] for t in types],
        *[r for c in kinds for r in vary(c, bare={"bias": None, "silu": False}, states=STATEFUL, seq_idx={"seq_idx": True, "x": F32})],
        *[r for c in kinds for r in vary(c, ids_states={"seq_idx": True, **STATEFUL, "states": "windows", "width": 3})],
        *[replace(c, id=f"{c.id}-packed", **(packed if "first" in c.id else short)) for c in kinds],
        *[replace(c, id=f"{c.id}-packed-states", lengths=SHORT, **STATEFUL, starts=I64, three=True, x=F32, width=3) for c in kinds],
        *[replace(c, id=f"{c.id}-pool", **POOL, batch=5, length=9, states="windows") for c in kinds[::3]],
        *[replace(c, id=f"{c.id}-n{n}", length=n, **STATEFUL) for c in kinds for n in (1, 2)],
        *[
            replace(c, id=f"{c.id}-{len(n)}-sequences", lengths=n, dim=8, **POOL)
            for c in (first_slice, last)
            for n in (many * 17, many * 260)
        ],
        *vary(first, in_place_states={"initial": True, "final": "in_place"}, wild={"scale": 40.0}, taps_odd={"taps": "odd"}),
        *vary(last, in_place_states={"initial": True, "final": "in_place"}, wild={"scale": 40.0}, taps_odd={"taps": "odd"}),
        *vary(first, taps_across={"taps": "transposed"}, out_shifted={"out": "first_slice"}, out_last={"out": "last"}, dim1={"dim": 1}),
        *vary(first, b0_final={"final": "new"}, b1_initial={"initial": True, "states": "gaps"}, pad5={**packed, "pad_slot_id": 5}),
        *vary(first_slice, out_aligned={"out": "first"}, out_dense={"out": "first_dense", **STATEFUL}, f32_w8={"x": F32, "width": 8}),
        *vary(last, taps_across={"taps": "transposed"}, out_odd={"out": "last_odd"}, out_first={"out": "first"}, dim1={"dim": 1}),
        *vary(last, b0_final={"final": "new"}, b1_initial={"initial": True, "states": "gaps"}, pad5={**short, "pad_slot_id": 5}),
        *vary(
            last, pool_fresh={"lengths": SHORT, "pool": True, "index": I32}, pool_order={"lengths": SHORT, "pool": True, "started": True}
        ),
        *vary(odd, pool_gaps={**short, "states": "gaps", "starts": I64, "index": I32}, w8_packed={**short, "width": 8, "x": F32}),
        *vary(first, packed_gaps={**packed, "states": "gaps", "starts": I64, "index": I32}, packed_w8={**packed, "width": 8, "x": F32}),
        *vary(first, none={"length": 0}, packed_none={"lengths": (0, 0, 0), **POOL}, packed_none_final={"lengths": (0, 0), **STATEFUL}),
        *vary(last, none_final={"length": 0, **STATEFUL}, none_pool={"length": 0, **POOL}),
    ]
    assert len({c.id for c in cases}) == len(cases)
    return cases


def update_matrix() -> list[UpdateCase]:
    shift, roll, ring = UpdateCase("shift"), UpdateCase("roll", ROLL, tokens=4), UpdateCase("ring", RING, state="channels", extra=3)
    channels = replace(shift, id="shift-channels", state="channels")
    plain = replace(shift, id="shift-any", state="any", dim=37, layout="odd")
    types = [(F32, F32, F32), (F16, F16, F16), (BF16, F32, F32), (F16, BF16, F32), (F32, F16, None), (BF16, BF16, None)]
    packed = {"lengths": (3, 1, 0, 9, 2, 4, 6), "tokens": None}
    saved = {"windows": {"saved": "windows"}, "channels": {"saved": "channels"}, "odd": {"saved": "odd", "dim": 37}}
    indexed = {"saved_index": I32, "saved": "windows", "batch": 8}
    bases = [shift, channels, plain]
    anywhere = {"state": "any", "dim": 37, "layout": "odd", "taps": "odd"}
    cases = [
        *[replace(shift, id=f"shift-t{t}", tokens=t) for t in (*range(1, 17), 20)],
        *[replace(channels, id=f"shift-channels-t{t}", tokens=t, extra=t % 4) for t in (1, 2, 3, 5, 9, 16, 20)],
        *[replace(c, id=f"{c.id}-w{w}", width=w) for c in bases for w in (2, 3, 5, 6, 7, 8)],
        *[replace(plain, id=f"shift-any-t{t}", tokens=t, extra=t % 3) for t in (1, 3, 20)],
        *[replace(c, id=f"{c.id}-types-{i}", x=t[0], weight=t[1], bias=t[2]) for c in bases for i, t in enumerate(types)],
        *[replace(c, id=f"{c.id}-longer", extra=5, tokens=3) for c in bases],
        *[replace(c, id=f"{c.id}-longer-in-place", extra=2, tokens=4, in_place=True) for c in bases],
        *[replace(shift, id=f"shift-dim{d}", dim=d) for d in (1, 2, 4, 100, 516, 2064)],
        *vary(shift, bare={"bias": None, "silu": False}, odd_x={"layout": "odd", "tokens": 2}, x_tokens={"layout": "windows", "tokens": 3}),
        *vary(shift, in_place={"in_place": True}, no_pool={"index": None}, i64_pad3={"index": I64, "pad_slot_id": 3, "batch": 9}),
        *vary(shift, batch130={"batch": 130}, batch130_odd={"batch": 131, **anywhere}, batch1={"batch": 1}, taps={"taps": "transposed"}),
        *vary(
            shift, state_odd={"state": "channels_odd"}, out_odd={"out": "odd"}, in_place_t3={"in_place": True, "tokens": 3, "layout": "odd"}
        ),
        *[replace(roll, id=f"roll-t{t}", tokens=t) for t in (None, 1, 2, 3, 5, 8, 16, 20)],
        *[replace(roll, id=f"roll-w{w}", width=w, x=x) for w, x in ((2, F32), (3, F16), (5, BF16), (8, F32))],
        *vary(roll, i64={"position": I64}, longer={"extra": 3}, channels={"state": "channels"}, any=anywhere, in_place={"in_place": True}),
        *vary(roll, channels_t16={"state": "channels", "tokens": 16, "extra": 1}, t20_any={**anywhere, "tokens": 20, "width": 2}),
        *vary(roll, packed={**packed}, packed_any={**packed, **anywhere, "position": I64}, saved=saved["windows"]),
        *vary(
            ring, t1={}, t4={"tokens": 4}, t16={"tokens": 16}, t20={"tokens": 20}, least={"extra": 0}, i64={"position": I64, "tokens": 2}
        ),
        *vary(
            ring, windows={"state": "windows", "tokens": 3}, any={**anywhere, "tokens": 3}, packed=packed, packed_any={**packed, **anywhere}
        ),
        *vary(
            ring, w8={"width": 8, "x": F32, "tokens": 5}, w2={"width": 2, "x": F16, "extra": 0, "tokens": 5}, in_place={"in_place": True}
        ),
        *vary(shift, packed=packed, packed_i64={**packed, "starts": I64, "x": F32}, packed_channels={**packed, "state": "channels"}),
        *vary(shift, packed_any={**packed, **anywhere, "extra": 3}, packed_in_place={**packed, "in_place": True, "extra": 2}),
        *[replace(shift, id=f"shift-saved-{k}", tokens=3, **s) for k, s in saved.items()],
        *[replace(shift, id=f"shift-saved-{k}-w2-f32", width=2, x=F32, **s) for k, s in saved.items()],
        *vary(shift, saved_rows={**indexed, "tokens": 4}, saved_rows_i64={**indexed, "saved_index": I64, "saved": "odd", "dim": 37}),
        *vary(shift, saved_packed={**packed, **indexed, "saved_tokens": -3}, saved_wide={**indexed, "tokens": 2, "saved_tokens": 3}),
        *vary(ring, saved={"saved": "channels", "tokens": 3}, saved_t20={"saved": "windows", "tokens": 20}),
    ]
    assert len({c.id for c in cases}) == len(cases)
    return cases


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
class Call:
    """A call's arguments, and what surrounds them in memory."""

    op: ModuleType
    memory: Memory
    kwargs: dict[str, Any]
    case: Any = None
    written: dict[str, str] = field(default_factory=dict)  # {operand: name of its buffer}

    def __post_init__(self) -> None:
        built = self.function.build(**self.kwargs)
        self.given, self.options, self.operands = built.given, built.options, built.operands
        self.views = self.op.CALLER.checked(self.operands, self.options, None)
        self.problem = self.op.problem_of(self.views, {n: t.data_ptr() for n, t in self.operands.items()}, self.options)

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(ssmgen, self.op.OPERATOR)

    def run(self, **more: Any) -> Any:
        return self.function(**self.kwargs, **more)

    def results(self) -> list[Tensor]:
        return [self.views[n] for n in self.op.FAMILY.written if n in self.views]


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
    return Call(forward_op, memory, kwargs, case, written)


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
    written = {"out": "x" if case.in_place else "out", "conv_state": "conv_state", "intermediate_conv_window": "intermediate_conv_window"}
    return Call(update_op, memory, kwargs, case, {n: b for n, b in written.items() if n != "intermediate_conv_window" or case.saved})


def make(case: Any, device: str, seed: int = 0) -> Call:
    return (make_call if isinstance(case, Case) else make_update)(case, device, seed)
