"""Operands for the replay functions: strided, poisoned, guarded; their expected results; and runs of many steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice
from typing import Any

import torch
from guarded_call import GuardedCall
from ssu_cases import BF16, F16, F32, Memory
from torch import Tensor
from torch.nn.functional import silu, softplus
from varying import vary

from ssmgen.engine.accuracy import norm_error

I32, I64 = torch.int32, torch.int64
HISTORY = ("old_x", "old_B", "old_dt", "old_dA_cumsum")
KEPT = ("cache_buf_idx", "ring_start", "prev_num_accepted_tokens", "rand_seed", "arrivals")
# Norm errors against float64. Measured on an H200: f32 1.1e-7 (states) and 2e-7 ... 6e-7 (outputs), f16 2.1e-4, bf16 1.66e-3. One rounding
# to nearest is off by 2^-11 or 2^-8 at most, and by half as much in the mean square. A stochastic one by twice that at most.
BOUND = {F32: 2e-6, F16: 2.0**-12, BF16: 2.0**-9}


@dataclass(frozen=True)
class Case:
    """One point of the matrix; `id` is readable."""

    id: str
    ring: bool = False  # checkpoint_selective_state_update
    heads: int = 4
    headdim: int = 16
    d_state: int = 32
    groups: int = 2
    batch: int = 7
    tokens: int = 5  # of a step, at most
    lengths: tuple[int, ...] = ()  # packed sequences
    window: int = 8
    accepted: tuple[int, ...] = ()  # in turn, by sequence; empty: of all kinds
    state: torch.dtype = F32
    x: torch.dtype = BF16
    dt: torch.dtype = BF16
    A: torch.dtype = F32
    D: torch.dtype | None = F32
    z: torch.dtype | None = None
    gate: float = 0.0  # mean of z
    dt_bias: torch.dtype | None = F32
    out: torch.dtype = F32
    softplus: bool = True
    expanded: bool = False  # dt, A, dt_bias and D have all of their axes
    index: torch.dtype | None = I32
    starts: torch.dtype = I32
    pad_slot_id: int = -1
    layout: str = "slices"  # of x, B and C: of one tensor; or: odd
    state_gap: int = 0  # elements between slots
    seeds: str = ""  # one, slots
    arrivals: bool = False
    precision: str = "f32"
    two_kernels: bool = False
    after_conv: bool = False

    @property
    def sequences(self) -> int:
        return len(self.lengths) or self.batch


STEP, RING = Case("step"), Case("ring", ring=True)
RAGGED = {"lengths": (3, 5, 0, 1, 4, 2, 5, 0)}
ALL_F32 = {"x": F32, "dt": F32, "dt_bias": F32, "z": F32}


def matrix() -> list[Case]:
    plain = {"D": None, "dt_bias": None, "softplus": False, "dt": F32}
    types = {"state": F16, "x": F16, "dt": F16, "A": BF16, "D": F16, "z": F16, "dt_bias": BF16, "out": F16}
    cases = [
        c
        for base in (STEP, RING)
        for c in (
            base,
            *vary(base, f16={"state": F16}, bf16={"state": BF16}, all_f32={**ALL_F32}, mixed=types, bare=plain, z={"z": BF16}),
            *vary(base, no_pool={"index": None}, i64_pad5={"index": I64, "pad_slot_id": 5}, odd={"layout": "odd", "state_gap": 3}),
            *vary(base, expanded={"expanded": True}, gap={"state_gap": 64}, p40={"headdim": 40}, h1={"heads": 1, "groups": 1}),
            *vary(base, ragged=RAGGED, ragged_i64={**RAGGED, "starts": I64, "z": F32}, ragged_no_pool={**RAGGED, "index": None}),
            *vary(base, t1={"tokens": 1}, t8={"tokens": 8}, w24={"window": 24, "tokens": 16}, w32={"window": 32, "tokens": 32}),
            *vary(base, w5={"window": 5}, none={"batch": 0}, one={"batch": 1}, philox={"state": BF16, "seeds": "one"}),
            *vary(base, philox_slots={"state": F16, "seeds": "slots"}, advance={"arrivals": True}),
            *vary(base, advance_ragged={"arrivals": True, **RAGGED, "state": BF16, "seeds": "one"}),
        )
    ]
    assert len({c.id for c in cases}) == len(cases)
    return cases


SHAPES = {"h16": (16, 64, 128, 1), "h32g2": (32, 64, 128, 2), "h24p80": (24, 80, 128, 1)}
STATES = {"f32": F32, "f16": F16, "bf16": BF16}


def shaped(name: str) -> dict[str, int]:
    return dict(zip(("heads", "headdim", "d_state", "groups"), SHAPES[name], strict=True))


def at_shapes() -> list[Case]:
    """Models' shapes, and batches that other variants serve."""
    cases = []
    for base in (STEP, RING):
        for shape in SHAPES:
            wide = replace(base, id=f"{base.id}-{shape}", tokens=6, **shaped(shape))
            cases += vary(wide, **{f"state_{n}": {"state": t} for n, t in STATES.items()})
            cases += vary(wide, x_f16={"x": F16, "z": F16}, x_f32={"x": F32, "dt": F32}, two={"two_kernels": True}, z={"z": BF16})
            cases += vary(wide, t1={"tokens": 1}, t8={"tokens": 8}, t16={"tokens": 16, "window": 16}, t27={"tokens": 27, "window": 32})
            cases += vary(wide, t32_bf16={"tokens": 32, "window": 32, "state": BF16}, two_t16={"two_kernels": True, "tokens": 16})
    cases = [replace(c, window=16) if not c.ring and c.tokens > c.window else c for c in cases]
    large = replace(STEP, heads=16, headdim=64, d_state=128, groups=1, tokens=6, state=BF16)
    own = [replace(large, id=f"step-own-b{n}", batch=n, out=BF16, seeds="slots") for n in (48, 100)]  # each warp has its own rows
    gated = {"z": F16, "gate": 3.0, "heads": 32, "groups": 2}  # enough elements count: the rounding of a few may exceed the bound
    own.append(replace(own[-1], id="step-own-advance", arrivals=True, **gated))
    return [*cases, *own, *[replace(large, id=f"step-h16-b{n}", batch=n) for n in (1, 4, 32, 100)]]


@dataclass
class Call(GuardedCall):
    slot_of: list[int]  # of each sequence; -1 for padding
    written: set[str]  # names of buffers

    @property
    def operator(self) -> str:
        return f"{'checkpoint' if self.case.ring else 'replay'}_selective_state_update"

    def results(self) -> dict[str, Tensor]:
        return {n: self.kwargs[n] for n in ("out", "state", *HISTORY, *KEPT) if n in self.kwargs}

    def lengths(self) -> list[int]:
        return list(self.case.lengths) or [self.case.tokens] * self.case.batch


def _accepted(case: Case) -> list[int]:
    """None, all, one, too many, fewer than none, some: the sequences' counts."""
    kinds = case.accepted or (case.window, 3, 0, 1, 2, case.window + 1, -3, case.window // 2)
    return list(islice(cycle(kinds), case.sequences))


def make(case: Case, device: str, seed: int = 0, sealed: bool = True) -> Call:
    """Random operands. NaN in slots, entries, buffers, tokens and sequences that must not be read; sequences 1 and 4 are padding.

    sealed: whether a copy of all memory is kept, to compare with it what a call leaves"""
    g, memory = torch.Generator().manual_seed(seed), Memory(device)
    H, P, N, G, count = case.heads, case.headdim, case.d_state, case.groups, case.sequences
    room = case.window + (case.tokens if case.ring else 0)
    both = () if case.ring else (2,)
    # At most 19 slots without a sequence: twice the batch would take 100 MiB more.
    slots, odd = (count + 1 if case.index is None else count + min(count, 16) + 3), case.layout == "odd"
    order = [s for s in torch.randperm(slots, generator=g).tolist() if s != case.pad_slot_id]
    invalid = {} if case.index is None else {1: case.pad_slot_id, 4: slots + 1, 9: -7}
    slot_of = [-1 if i in invalid else (i if case.index is None else order[i]) for i in range(count)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    def place(name: str, shape: tuple[int, ...], dtype: torch.dtype, gap: int = 0, values: Tensor | None = None) -> Tensor:
        """A tensor in its buffer, with a gap after the last axis; NaN if there are no values."""
        strides = torch.empty((*shape[:-1], shape[-1] + gap), device="meta").stride()
        t = (
            memory.view(name, shape, tuple(strides), dtype, 65 if odd else 64)
            if 0 not in shape
            else torch.empty(shape, dtype=dtype, device=device)
        )
        return t.fill_(float("nan")) if values is None else t.copy_(values)

    gap = 1 if odd else 8
    state = memory.view("state", (slots, H, P, N), (H * P * N + case.state_gap, P * N, N, 1), case.state, 65 if odd else 64)
    state.fill_(float("nan"))
    rate = -(torch.rand(H, generator=g) + 0.1).to(case.A)
    kwargs: dict[str, Any] = {
        "state": state,
        "old_x": place("old_x", (slots, room, H, P), case.x, gap),
        "old_B": place("old_B", (slots, *both, room, G, N), case.x, gap),
        "old_dt": place("old_dt", (slots, *both, H, room), F32, 3),
    }
    counts, first = torch.full((slots,), 2**30, dtype=I32), torch.randint(0, room, (slots,), generator=g, dtype=I32)
    buffer = torch.randint(0, 2, (slots,), generator=g, dtype=I32)
    if not case.ring:
        kwargs["old_dA_cumsum"] = place("old_dA_cumsum", (slots, 2, H, room), F32, 3)
    for slot, accepted in zip(slot_of, _accepted(case), strict=True):
        if slot < 0:
            continue
        counts[slot] = accepted
        state[slot] = normal(H, P, N).to(case.state)
        live = accepted if 0 < accepted <= case.window else 0
        at = [(int(first[slot]) + k) % room for k in range(live)] if case.ring else list(range(live))
        here = () if case.ring else (int(buffer[slot]),)
        kwargs["old_x"][slot, at] = normal(live, H, P).to(device, case.x)
        kwargs["old_B"][slot][here][at] = normal(live, G, N).to(device, case.x)
        steps = torch.rand(H, live, generator=g)
        kwargs["old_dt"][slot][here][:, at] = steps.to(device)
        if not case.ring:
            sums = (rate.double()[:, None] * steps.double()).cumsum(-1)
            kwargs["old_dA_cumsum"][slot][here][:, at] = sums.float().to(device)

    lead = (sum(case.lengths) + 2,) if case.lengths else (count, case.tokens)  # packed ones are followed by room for more
    conv = place("conv", (*lead, H * P + 2 * G * N), case.x, gap, normal(*lead, H * P + 2 * G * N).to(case.x))
    x, B, C = conv.split([H * P, G * N, G * N], -1)
    kwargs |= {"x": x.unflatten(-1, (H, P)), "B": B.unflatten(-1, (G, N)), "C": C.unflatten(-1, (G, N))}
    kwargs["dt"] = place("dt", (*lead, H), case.dt, 3, normal(*lead, H).to(case.dt))
    if case.z:
        kwargs["z"] = place("z", (*lead, H, P), case.z, gap, (normal(*lead, H, P) + case.gate).to(case.z))
    for s, slot in enumerate(slot_of):
        if slot < 0:
            at = slice(sum(case.lengths[:s]), sum(case.lengths[: s + 1])) if case.lengths else s
            for t in (conv, kwargs["dt"], kwargs.get("z", conv)):
                t[at] = float("nan")
    if case.lengths:
        for t in (conv, kwargs["dt"], kwargs.get("z", conv)):
            t[sum(case.lengths) :] = float("nan")
        kwargs["cu_seqlens"] = memory.fill("cu_seqlens", torch.tensor([0, *accumulate(case.lengths)], dtype=case.starts))
    kwargs["A"] = memory.fill("A", rate)
    if case.dt_bias:
        kwargs["dt_bias"] = memory.fill("dt_bias", normal(H).to(case.dt_bias))
    if case.D:
        kwargs["D"] = memory.fill("D", normal(H, P).to(case.D) if case.expanded else normal(H).to(case.D))
    if case.expanded:
        kwargs["dt"] = kwargs["dt"][..., None].expand(*lead, H, P)
        kwargs["A"] = kwargs["A"][:, None, None].expand(H, P, N)
        if case.dt_bias:
            kwargs["dt_bias"] = kwargs["dt_bias"][:, None].expand(H, P)
    kwargs["out"] = place("out", (*lead, H, P), case.out, gap)
    kwargs["prev_num_accepted_tokens"] = memory.fill("prev_num_accepted_tokens", counts)
    name, values = ("ring_start", first) if case.ring else ("cache_buf_idx", buffer)
    kwargs[name] = memory.fill(name, values)
    if case.index:
        chosen = torch.tensor([invalid.get(s, slot) for s, slot in enumerate(slot_of)], dtype=case.index)
        kwargs["state_indices"] = place("state_indices", (count, 1), case.index, 1, chosen[:, None])[:, 0]
    if case.seeds:
        seeds = torch.randint(-(2**62), 2**62, (1 if case.seeds == "one" else slots,), generator=g)
        kwargs["rand_seed"] = memory.fill("rand_seed", seeds)
    if case.arrivals:
        kwargs["arrivals"] = memory.fill("arrivals", torch.zeros(slots, dtype=I32))
    kwargs |= {"dt_softplus": case.softplus, "pad_slot_id": case.pad_slot_id, "precision": case.precision}
    kwargs |= {"two_kernels": case.two_kernels, "after_conv": case.after_conv}
    if case.ring:
        kwargs["max_tokens"] = case.tokens
    if sealed:
        memory.seal()
    written = {"out", "state", *HISTORY} & set(memory.buffers)
    return Call(case, memory, kwargs, slot_of, written | (set(KEPT) & set(memory.buffers) if case.arrivals else set()))


def recurrence(S: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(C S [T, H, P], the last S [H, P, N]) token by token: S <- exp(dt A) S + dt x B, of x [T, H, P], dt [T, H], B, C [T, G, N]."""
    outs, per_group = [], S.shape[0] // B.shape[-2]
    for t in range(len(x)):
        S = torch.exp(dt[t] * A)[:, None, None] * S + torch.einsum("h,hp,hn->hpn", dt[t], x[t], B[t].repeat_interleave(per_group, 0))
        if C is not None:
            outs.append(torch.einsum("hpn,hn->hp", S, C[t].repeat_interleave(per_group, 0)))
    return torch.stack(outs) if outs else x.new_zeros(0, *S.shape[:2]), S


def sized(kwargs: dict[str, Any], dt: Tensor) -> Tensor:
    """dt as the recurrence takes it, in float64."""
    dt = dt.double() + (kwargs["dt_bias"].double() if "dt_bias" in kwargs else 0)
    return softplus(dt, threshold=700) if kwargs["dt_softplus"] else dt


def dressed(kwargs: dict[str, Any], out: Tensor, x: Tensor, z: Tensor | None) -> Tensor:
    out = out + (kwargs["D"].double().reshape(out.shape[-2], -1) * x if "D" in kwargs else 0)
    return out if z is None else out * silu(z.double())


def _plain(case: Case, k: dict[str, Any]) -> dict[str, Any]:
    """Operands without the axes that are expanded."""
    if not case.expanded:
        return k
    return k | {"dt": k["dt"][..., 0], "A": k["A"][:, 0, 0]} | ({"dt_bias": k["dt_bias"][:, 0]} if "dt_bias" in k else {})


def _history(case: Case, k: dict[str, Any], slot: int) -> tuple[int, int, tuple[int, ...]]:
    """(entries that count, the first one's place, the index of the buffer) of a slot."""
    live = int(k["prev_num_accepted_tokens"][slot])
    first = int(k["ring_start"][slot]) if case.ring else 0
    return live if 0 < live <= case.window else 0, first, () if case.ring else (int(k["cache_buf_idx"][slot]),)


def _exact(case: Case, k: dict[str, Any], slot: int, pick: int | slice) -> tuple[Tensor, Tensor]:
    """(state after the history, outputs) of a sequence, in float64."""
    live, first, here = _history(case, k, slot)
    old = [(first + i) % k["old_x"].shape[1] for i in range(live)]
    history = k["old_x"][slot, old].double(), k["old_dt"][slot][here][:, old].double().t()
    A, x = k["A"].double(), k["x"][pick].double()
    S = recurrence(k["state"][slot].double(), *history, A, k["old_B"][slot][here][old].double())[1]
    out = recurrence(S, x, sized(k, k["dt"][pick]), A, k["B"][pick].double(), k["C"][pick].double())[0]
    return S, dressed(k, out, x, k["z"][pick] if "z" in k else None)


def exact_outputs(call: Call) -> Iterator[Tensor]:
    """Outputs in float64, one sequence after the other: of large pools `expected` takes eight bytes an element and more."""
    case, k, at = call.case, _plain(call.case, call.kwargs), 0
    for s, (slot, T) in enumerate(zip(call.slot_of, call.lengths(), strict=True)):
        pick = slice(at, at + T) if case.lengths else s
        at += T
        if slot >= 0 and T:
            yield _exact(case, k, slot, pick)[1]


def expected(call: Call) -> dict[str, Tensor]:
    """The results of a call, in float64 if they are floating point; computed from its operands before it is made."""
    case, k = call.case, {n: t.detach().cpu().clone() if isinstance(t, Tensor) else t for n, t in call.kwargs.items()}
    k = _plain(case, k)
    for name in ("out", "state", "old_dt", "old_dA_cumsum"):
        k |= {name: k[name].double()} if name in k else {}
    room, at = k["old_x"].shape[1], 0
    for s, (slot, T) in enumerate(zip(call.slot_of, call.lengths(), strict=True)):
        pick = slice(at, at + T) if case.lengths else s
        at += T
        if slot < 0:
            k["out"][pick] = 0
            continue
        if T == 0:
            continue
        live, first, here = _history(case, k, slot)
        there = () if case.ring else (1 - here[0],)
        S, k["out"][pick] = _exact(case, k, slot, pick)
        x, step = k["x"][pick], sized(k, k["dt"][pick])
        empties = live > 0 if not case.ring else live + T > case.window
        if empties:
            k["state"][slot] = S
        A = k["A"].double()
        new = [(first + live + t) % room if case.ring else t for t in range(T)]
        k["old_x"][slot, new], k["old_B"][slot][there][new] = x, k["B"][pick]
        k["old_dt"][slot][there][:, new] = step.t()
        if not case.ring:
            k["old_dA_cumsum"][slot][there][:, new] = (step * A).cumsum(0).t()
        if case.arrivals:
            if not case.ring:
                k["cache_buf_idx"][slot] = there[0]
            elif empties:
                k["ring_start"][slot] = (first + live) % room
            if empties or not case.ring:
                k["prev_num_accepted_tokens"][slot] = 0
            if case.seeds == "slots" and empties:
                k["rand_seed"][slot] += 1
    return {n: k[n] for n in call.results()}


def bound_of(call: Call, name: str, scale: float = 1.0) -> float:
    """The bound of the norm error of a result, in each sequence or slot."""
    return scale * BOUND[call.kwargs[name].dtype] * (2 if name == "state" and call.case.seeds else 1) + BOUND[F32]


def assert_matches(call: Call, want: dict[str, Tensor], scale: float = 1.0) -> None:
    """Computed values are within their bounds in every sequence and slot, copies are bit-exact, and the rest of memory is unchanged."""
    wrong = call.memory.untouched(dict.fromkeys(call.written))
    assert not wrong, f"changed outside what the call may write: {wrong}"
    before = {n: b.as_strided(*w).cpu() for n, (_, b, w) in call.memory.buffers.items()}
    for name, exact in want.items():
        got = call.kwargs[name].detach().cpu()
        if name in ("old_x", "old_B", *KEPT):
            assert torch.equal(got.nan_to_num(7.0), exact.nan_to_num(7.0)) and torch.equal(got != got, exact != exact), f"{name} differs"
            continue
        assert torch.equal(got.isnan(), exact.isnan()), f"{name}: NaN in other places than expected"
        bound = bound_of(call, name, scale)
        for i in range(len(got)):  # slots, or sequences
            same = name in before and torch.equal(exact[i].nan_to_num(7.0), before[name][i].double().nan_to_num(7.0))
            error = norm_error(got[i].nan_to_num(), exact[i].nan_to_num())
            assert error <= (0 if same else bound), f"{name}[{i}] is off by {error:.2e}, the bound is {bound:.2e}"
