"""Laws and error bounds of causal_conv1d and causal_conv1d_update, and runs of their kernels on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest
import torch
from bits import bits
from bits import same as equal
from conv_cases import I32, I64, Call
from emulated_calls import SM90, emulate, needs_emulator  # noqa: F401
from ssu_cases import ulp
from torch import Tensor

import ssmgen
from ssmgen.engine.convolution_calls import ACTIVATIONS

LAST_AXIS = pytest.mark.parametrize("last", [False, True], ids=["first", "last"])  # whether channels are the contiguous axis


@dataclass
class Expected:
    out: Tensor  # float64
    bound: Tensor
    kept: dict[str, Tensor]  # states, bit for bit


def activated(total: Tensor, size: Tensor, width: int, silu: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(output, how far a computation in f32 with one rounding at the store may be from it) of a float64 sum and its absolute sum.

    A chain of `width` multiply-adds rounds as often, each time by 2^-24 of the absolute sum at most. silu's slope is below 1.1; its
    ex2.approx (2^-22), rcp.approx (2^-23) and two roundings stay below 2^-21, and the argument's roundings cost |v| 2^-23 more. Values
    flushed to zero are below 2^-118. A result rounded past a power of two is off by the error twice.
    """
    error = (width + 1) * 2.0**-24 * size
    if silu:
        out = total * torch.sigmoid(total)
        error = 1.1 * error + 2.0**-21 * (1 + total.abs()) * out.abs() + torch.where(size > 0, 2.0**-118, 0.0)
    else:
        out = total
    return out, 2 * error + torch.where(out == 0, 0, 0.5 * ulp(out, dtype))


def expected(call: Call) -> Expected:
    """The results that a call must give, with error bounds. Computed before the call."""
    views = {n: t.detach().cpu() for n, t in call.views.items()}
    states = [n for n in call.op.FAMILY.written if n in views and n != "out"]

    def run(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        operands = {n: change(t) if t.is_floating_point() else t for n, t in views.items()}
        kept = {n: operands[n].clone() for n in states}
        out = torch.zeros(views["out"].shape, dtype=torch.float64)
        pad = call.options[1]
        call.op.reference(**operands | kept | {"out": out}, silu=False, pad_slot_id=pad, dtype=torch.float64)
        return out, kept

    (total, kept), (size, _) = run(lambda t: t), run(torch.abs)
    silu = ACTIVATIONS[call.options[0]]
    return Expected(*activated(total, size, views["weight"].shape[1], silu, views["out"].dtype), kept)


def assert_matches(call: Call, want: Expected) -> None:
    """The output within its bound, states bit for bit, and nothing else in memory changed."""
    wrong = call.memory.untouched(dict.fromkeys(call.written.values()))
    assert not wrong, f"changed outside what the call may write: {wrong}"
    for name, state in want.kept.items():
        different = (call.views[name].cpu() != state if name == "parents_out" else bits(call.views[name].cpu()) != bits(state)).nonzero()
        assert not len(different), f"{name} differs in {len(different)} elements, the first of them {different[0].tolist()}"
    out = call.views["out"].detach().cpu().double()
    difference = torch.where(want.bound > 0, (out - want.out).abs() / want.bound, torch.where(out == want.out, 0.0, torch.inf))
    assert (difference <= 1).all(), f"out off by {float(difference.nan_to_num(nan=torch.inf).max()):.2f} x its bound"


# The emulator: kernels on a CPU. It stops at accesses that are out of bounds or misaligned, and at elements written by two threads.


def emulated(op: ModuleType):
    """A function that runs the operator in the emulator and has the public function's signature."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return emulate(getattr(ssmgen, op.OPERATOR).build(*args, **kwargs))

    return function


# Laws of the public functions or of their emulated versions. Each law takes both functions and a device.


class Draw:
    """Random operands of one dtype; tokens are contiguous where `last` is not set, channels where it is."""

    def __init__(self, device: str, dtype: torch.dtype, last: bool, dim: int = 24, width: int = 4, seed: int = 0):
        self.g, self.device, self.dtype, self.last, self.dim, self.width = (
            torch.Generator().manual_seed(seed),
            device,
            dtype,
            last,
            dim,
            width,
        )
        self.weights = self(dim, width) * 0.5, self(dim)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.g).to(self.device, self.dtype)

    def tokens(self, *lead: int, length: int) -> Tensor:
        return self(*lead, length, self.dim).transpose(-1, -2) if self.last else self(*lead, self.dim, length)

    def states(self, count: int, length: int | None = None) -> Tensor:
        return self.tokens(count, length=self.width - 1 if length is None else length)

    def ints(self, values: list[int], dtype: torch.dtype = I32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def forward_equals_updates(forward: Any, update: Any, draw: Draw, batch: int = 3, length: int = 23) -> None:
    x, past = draw.tokens(batch, length=length), draw.states(batch)
    state = past.clone()
    outs = torch.stack([update(x[..., t], state, *draw.weights, "silu") for t in range(length)], -1)
    out, final = forward(x, *draw.weights, activation="silu", initial_states=past, return_final_states=True)
    assert equal(out, outs) and equal(final, state)


def several_tokens_equal_single_ones(update: Any, draw: Draw, state_len: int, counts: tuple[int, ...], ring: bool = False) -> None:
    batch, most = 3, max(counts)
    x, past = draw.tokens(batch, length=most), draw.states(batch, state_len)
    seen = [0, 7, 1000]

    def position(t: int) -> dict[str, Tensor]:
        return {"cache_seqlens": draw.ints([n + t for n in seen])} if ring else {}

    single, outs, states = past.clone(), [], []
    for t in range(most):
        outs.append(update(x[..., t], single, *draw.weights, **position(t)))
        states.append(single.clone())
    for T in counts:
        state = past.clone()
        out = update(x[..., :T], state, *draw.weights, **position(0))
        assert equal(out, torch.stack(outs[:T], -1)) and equal(state, states[T - 1]), f"{T} tokens"


def ring_equals_shift(update: Any, draw: Draw, state_len: int, tokens: int) -> None:
    batch, steps = 3, 2 * state_len // tokens + 2
    seen = draw.ints([0, draw.width, 101])
    shift, ring = draw.states(batch, state_len), draw.states(batch, state_len)
    for b, n in enumerate(seen.tolist()):  # input i is entry i modulo state_len
        for k in range(state_len):
            ring[b, :, (n - state_len + k) % state_len] = shift[b, :, k]
    for _ in range(steps):
        x = draw.tokens(batch, length=tokens)
        a = update(x, shift, *draw.weights, "silu")
        b = update(x, ring, *draw.weights, "silu", cache_seqlens=seen)
        seen = seen + tokens
        assert equal(a, b)
    for b, n in enumerate(seen.tolist()):
        assert equal(torch.stack([ring[b, :, (n - state_len + k) % state_len] for k in range(state_len)], -1), shift[b])


def speculation_equals_the_accepted_history(forward: Any, update: Any, draw: Draw, tokens: int, steps: int = 8) -> None:
    """Each step's outputs equal a convolution over the accepted history and the step's own tokens."""
    batch, width = 3, draw.width
    state = draw.states(batch, width - 2 + tokens)
    history = [state[b, :, : width - 1].clone() for b in range(batch)]
    accepted = [1] * batch
    for _ in range(steps):
        x = draw.tokens(batch, length=tokens)
        out = update(x, state, *draw.weights, "silu", num_accepted_tokens=draw.ints(accepted))
        accepted = torch.randint(1, tokens + 1, (batch,), generator=draw.g).tolist()
        for b in range(batch):
            full = torch.cat([history[b], x[b]], 1)
            assert equal(forward(full[None], *draw.weights, activation="silu")[0, :, -tokens:], out[b])
            history[b] = full[:, : full.shape[1] - tokens + accepted[b]]


TREE = (-1, 0, 0, 1, 1, 2, 5, 0, 3)  # parents: each earlier, so that any order in which they stay so is the same tree


def a_tree(update: Any, draw: Draw, x: Tensor, past: Tensor, parents: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, windows after each token, state) of a call."""
    batch, dim, T = x.shape
    state, windows = past.clone(), x.new_zeros(batch, T, dim, draw.width - 1)
    tree = {} if parents is None else {"parents": draw.ints([list(parents)] * batch)}
    return update(x, state, *draw.weights, "silu", intermediate_conv_window=windows, **tree), windows, state


def a_chain_is_no_tree(update: Any, draw: Draw, state_len: int, tokens: int = 7) -> None:
    """Parents that are not earlier tokens also make a chain: each token then follows the one before it."""
    x, past = draw.tokens(3, length=tokens), draw.states(3, state_len)
    want = a_tree(update, draw, x, past, None)
    for parents in (range(-1, tokens - 1), [-1] * tokens, range(tokens), [2**31 - 1] * tokens, [-(2**31)] * tokens):
        assert all(map(equal, a_tree(update, draw, x, past, parents), want)), parents


def each_path_equals_the_path_alone(update: Any, draw: Draw, state_len: int) -> None:
    x, past = draw.tokens(2, length=len(TREE)), draw.states(2, state_len)
    out, windows, state = a_tree(update, draw, x, past, TREE)
    assert equal(state, a_tree(update, draw, x, past, None)[2]), "the state receives the inputs in their order"
    for t in range(len(TREE)):
        path = [t]
        while path[0] > 0:
            path.insert(0, TREE[path[0]])
        alone, kept, _ = a_tree(update, draw, x[..., path], past, None)
        assert equal(alone[..., -1], out[..., t]) and equal(kept[:, -1], windows[:, t]), f"path {path}"


def the_order_of_siblings_changes_nothing(update: Any, draw: Draw, state_len: int) -> None:
    x, past = draw.tokens(2, length=len(TREE)), draw.states(2, state_len)
    out, windows, _ = a_tree(update, draw, x, past, TREE)
    order = [0, 7, 2, 1, 5, 4, 3, 6, 8]  # the tokens, by their numbers above
    parents = [-1, *(order.index(TREE[t]) for t in order[1:])]
    again, kept, _ = a_tree(update, draw, x[..., order], past, parents)
    assert equal(again, out[..., order]) and equal(kept, windows[:, order])


def packed_equals_each_sequence(forward: Any, draw: Draw, lengths: tuple[int, ...] = (5, 0, 300, 1, 2, 33)) -> None:
    x, starts = draw.tokens(length=sum(lengths)), draw.ints([0, *accumulate(lengths)])
    pool, has = draw.states(len(lengths) + 3), torch.tensor([True, True, False, True, False, True], device=draw.device)
    slots = draw.ints([4, 0, 2, 7, 1, 3], I64)
    before = pool.clone()
    out = forward(x, *draw.weights, query_start_loc=starts, conv_states=pool, conv_state_indices=slots, has_initial_state=has)
    states = torch.where(has[:, None, None], before[slots], 0)
    again, final = forward(x, *draw.weights, query_start_loc=starts, initial_states=states, return_final_states=True)
    assert equal(out, again)
    for s, (n, slot) in enumerate(zip(lengths, slots.tolist(), strict=True)):
        at = int(starts[s])
        if n == 0:
            assert equal(final[s], states[s]) and equal(pool[slot], before[slot])
            continue
        one, last = forward(x[None, :, at : at + n], *draw.weights, initial_states=states[s : s + 1], return_final_states=True)
        assert equal(one[0], out[:, at : at + n]) and equal(last[0], pool[slot]) and equal(last[0], final[s]), f"sequence {s}"
    others = [s for s in range(len(pool)) if s not in slots.tolist()]
    assert equal(pool[others], before[others])


def segments_equal_sequences(forward: Any, draw: Draw, lengths: tuple[int, ...] = (3, 1, 40, 2, 260, 7)) -> None:
    """seq_idx: the first segment follows the initial state, the others nothing; the final state is the last one's."""
    total, past = sum(lengths), draw.states(1)
    x = draw.tokens(1, length=total + 5)
    ids = [i for i, n in enumerate(lengths) for _ in range(n)]
    padded = torch.tensor([[*ids, *[-1] * 5]], dtype=I32, device=draw.device)
    out = forward(x, *draw.weights, activation="silu", seq_idx=padded, initial_states=past)
    assert not out[..., total:].any()
    last = forward(x[..., :total], *draw.weights, seq_idx=padded[:, :total], return_final_states=True)[1]
    at = 0
    for i, n in enumerate(lengths):
        first = past if i == 0 else torch.zeros_like(past)
        one, final = forward(x[..., at : at + n], *draw.weights, activation="silu", initial_states=first, return_final_states=True)
        assert equal(one, out[..., at : at + n]), f"segment {i}"
        at += n
    assert equal(last, final)


def split_equals_whole(forward: Any, draw: Draw, points: tuple[int, ...], length: int) -> None:
    """A sequence may be cut anywhere: the first part's final states are the second's initial ones, which they may replace in memory."""
    x, past = draw.tokens(2, length=length), draw.states(2)
    want, final = forward(x, *draw.weights, initial_states=past, return_final_states=True)
    for point in points:
        state = past.clone()
        parts = [x[..., :point], x[..., point:]]
        outs = [forward(p, *draw.weights, initial_states=state, final_states_out=state, return_final_states=True)[0] for p in parts]
        assert equal(torch.cat(outs, -1), want) and equal(state, final), f"split at {point}"
