"""The drop-in signatures of causal-conv1d, against torch.nn.functional.conv1d in float64."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import pad
from torch_conv import BF16, DIM, F16, F32, close, conv, randn, taps, zeros_before

from ssmgen.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from ssmgen.errors import ArgumentError


def laid_out(t: Tensor, layout: str) -> Tensor:
    """[batch, dim, length] with such strides; NaN lies between its elements."""
    b, d, n = t.shape
    if layout == "channel-first":
        return t.clone(memory_format=torch.contiguous_format)
    if layout == "channel-last":
        return t.mT.clone(memory_format=torch.contiguous_format).mT
    if layout == "channel-first-slice":
        place = t.new_full((b, d + 9, n + 3), torch.nan)[:, 5 : 5 + d, 1 : 1 + n]
    elif layout == "channel-last-slice":
        place = t.new_full((b, n, d + 9), torch.nan)[..., 5 : 5 + d].mT
    else:  # neither is contiguous
        place = t.new_full((b, n, d, 2), torch.nan)[..., 1].mT
    return place.copy_(t)


LAYOUTS = ["channel-first", "channel-last", "channel-first-slice", "channel-last-slice", "strided"]

# causal-conv1d: signatures.

NEEDED = inspect.Parameter.empty
SIGNATURES = {
    causal_conv1d_fn: {
        "x": NEEDED, "weight": NEEDED, "bias": None, "seq_idx": None, "initial_states": None, "return_final_states": False,
        "final_states_out": None, "activation": None,
    },
    causal_conv1d_update: {
        "x": NEEDED, "conv_state": NEEDED, "weight": NEEDED, "bias": None, "activation": None, "cache_seqlens": None,
        "conv_state_indices": None,
    },
    causal_conv1d_varlen_states: {"x": NEEDED, "cu_seqlens": NEEDED, "state_len": NEEDED},
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signature(function):
    parameters = inspect.signature(function).parameters
    assert [(n, p.default) for n, p in parameters.items()] == list(SIGNATURES[function].items())
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


# causal_conv1d_fn.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_fn(layout, width, activation):
    weight, bias = taps(width)
    for length in (1, 2, 7, 33):
        x = laid_out(randn(2, DIM, length), layout)
        before = x.clone()
        for b in (None, bias):
            out = causal_conv1d_fn(x, weight, b, None, None, False, None, activation)
            assert out.dtype == F32 and close(out, conv(zeros_before(x, width), x, weight, b, activation))
        assert torch.equal(x, before)


@pytest.mark.parametrize("x_dtype", [F32, F16, BF16])
@pytest.mark.parametrize("weight_dtype", [F32, F16, BF16])
def test_fn_dtypes(x_dtype, weight_dtype):
    """The bias may have another dtype than the weight."""
    x = laid_out(randn(2, DIM, 19, dtype=x_dtype), "channel-last")
    weight, bias = taps(4, weight_dtype)
    initial = randn(2, DIM, 3, dtype=x_dtype)
    for b in (None, bias, bias.float()):
        out, final = causal_conv1d_fn(x, weight, b, initial_states=initial, return_final_states=True, activation="silu")
        assert out.dtype == final.dtype == x_dtype and close(out, conv(initial, x, weight, b, "silu")) and torch.equal(final, x[..., -3:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("states_layout", LAYOUTS)
@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
def test_fn_states(layout, states_layout, started):
    """Final windows go into a given tensor or a new one, also for sequences shorter than the window."""
    for width in (2, 4, 8):
        weight, bias = taps(width)
        for length in (1, 2, 9):
            x = laid_out(randn(2, DIM, length), layout)
            initial = laid_out(randn(2, DIM, width - 1, seed=7), states_layout) if started else None
            history = zeros_before(x, width) if initial is None else initial
            given = laid_out(torch.full((2, DIM, width - 1), torch.nan), states_layout)
            want, inputs = conv(history, x, weight, bias), torch.cat([history, x], -1)
            out, final = causal_conv1d_fn(x, weight, bias, None, initial, True, given)
            assert final is given and close(out, want) and torch.equal(given, inputs[..., length:])
            again, final = causal_conv1d_fn(x, weight, bias, initial_states=initial, return_final_states=True)
            assert torch.equal(again, out) and torch.equal(final, given)
            assert initial is None or torch.equal(initial, laid_out(randn(2, DIM, width - 1, seed=7), "channel-first"))


def test_fn_writes_final_states_only_if_they_are_returned():
    x, (weight, bias) = randn(2, DIM, 9), taps(4)
    given = torch.full((2, DIM, 3), 5.0)
    out = causal_conv1d_fn(x, weight, bias, final_states_out=given)
    assert isinstance(out, Tensor) and (given == 5).all()


def test_fn_in_pieces_is_bit_equal():
    x, (weight, bias) = randn(2, DIM, 40, dtype=BF16), taps(4)
    whole, last = causal_conv1d_fn(x, weight, bias, return_final_states=True, activation="silu")
    state, pieces = None, []
    for piece in x.split([1, 2, 20, 3, 14], -1):
        out, state = causal_conv1d_fn(piece, weight, bias, initial_states=state, return_final_states=True, activation="silu")
        pieces.append(out)
    assert torch.equal(torch.cat(pieces, -1), whole) and torch.equal(state, last)


ROWS = [
    [(0, 5), (1, 1), (2, 2), (3, 12)],
    [(7, 11), (3, 9)],
    [(4, 3), (-1, 2), (5, 1), (9, 9), (-1, 5)],
    [(-1, 4), (0, 16)],
]  # runs of seq_idx


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [2, 3, 4])
def test_fn_seq_idx(layout, width):
    """Each run is a separate sequence; runs of negative numbers are padding."""
    weight, bias = taps(width)
    seq_idx = torch.tensor([[i for i, n in row for _ in range(n)] for row in ROWS], dtype=torch.int32)
    x = laid_out(randn(4, DIM, 20), layout)
    for activation in (None, "silu"):
        out = causal_conv1d_fn(x, weight, bias, seq_idx, activation=activation)
        for row, runs in enumerate(ROWS):
            start = 0
            for i, n in runs:
                piece, got = x[row, :, start : start + n], out[row, :, start : start + n]
                want = conv(zeros_before(piece, width), piece, weight, bias, activation)
                assert close(got, want) if i >= 0 else not got.any()
                start += n


def test_fn_seq_idx_with_states():
    """The initial state belongs to a row's first sequence, the final state to its last."""
    x, initial, (weight, bias) = randn(3, DIM, 9), randn(3, DIM, 3, seed=7), taps(4)
    starts = [4, 8, 7]  # of the second sequence of each row
    seq_idx = torch.stack([(torch.arange(9) >= n).int() for n in starts])
    out, final = causal_conv1d_fn(x, weight, bias, seq_idx, initial, True)
    for row, n in enumerate(starts):
        first, second = x[row, :, :n], x[row, :, n:]
        nothing = zeros_before(second, 4)
        assert close(out[row, :, :n], conv(initial[row], first, weight, bias)) and close(
            out[row, :, n:], conv(nothing, second, weight, bias)
        )
        assert torch.equal(final[row], torch.cat([nothing, second], -1)[:, -3:])


# causal_conv1d_update.


@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("state_layout", ["channel-first", "channel-last", "strided"])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_update(width, state_layout, activation):
    """One and several tokens, more of them than the state is long, and states that are longer than the window."""
    weight, bias = taps(width)
    for tokens in (None, 1, 4, 5, 11):
        x = randn(3, DIM, dtype=F32) if tokens is None else laid_out(randn(3, DIM, tokens), "channel-last")
        for state_len in (width - 1, width, width + 9):
            start = randn(3, DIM, state_len, seed=5)
            state = laid_out(start, state_layout)
            out = causal_conv1d_update(x, state, weight, bias, activation)
            new = x[..., None] if tokens is None else x
            assert out.shape == x.shape and close(out.reshape(new.shape), conv(start, new, weight, bias, activation))
            assert torch.equal(state, torch.cat([start, new], -1)[..., -state_len:])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("state_len", [3, 4, 7])
def test_update_circular(state_len, index_dtype):
    """Steps of a ring that started empty are the convolution of all inputs; entry i modulo its length holds input i."""
    (weight, bias), width = taps(4), 4
    x = randn(2, DIM, 30)
    for steps in ([1] * 30, [1, 3, 2, 1, 1, 3, 3, 2, 3, 1, 3, 1, 3, 3], [8, 1, 13, 8]):
        state, seen, out = torch.zeros(2, DIM, state_len), torch.zeros(2, dtype=index_dtype), []
        for piece in x.split(steps, -1):
            if piece.shape[-1] == 1:
                piece = piece[..., 0]
            out.append(causal_conv1d_update(piece, state, weight, bias, "silu", seen).reshape(2, DIM, -1))
            seen += out[-1].shape[-1]
        assert close(torch.cat(out, -1), conv(zeros_before(x, width), x, weight, bias, "silu"))
        assert all(torch.equal(state[..., i % state_len], x[..., i]) for i in range(30 - state_len, 30))


def test_update_circular_rows_are_at_different_places():
    """Untouched entries stay. cache_seqlens may be large, and less than the window."""
    width, state_len, tokens = 4, 9, 2
    weight, bias = taps(width)
    seen = [0, 1, 2, 8, 9, 1000, 2**31 - 3]
    start, x = randn(len(seen), DIM, state_len), randn(len(seen), DIM, tokens)
    state = laid_out(start, "channel-last")
    out = causal_conv1d_update(x, state, weight, bias, cache_seqlens=torch.tensor(seen, dtype=torch.int32))
    for row, n in enumerate(seen):
        in_order = start[row].roll(-(n % state_len), -1)  # the oldest entry first
        assert close(out[row], conv(in_order, x[row], weight, bias))
        want = torch.cat([x[row], in_order[:, tokens:]], -1).roll(n % state_len, -1)
        assert torch.equal(state[row], want)


SLOTS = 9


@pytest.mark.parametrize("circular", [False, True], ids=["shifted", "circular"])
@pytest.mark.parametrize("tokens", [None, 1, 5])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_update_of_slots(circular, tokens, index_dtype):
    """Rows of negative slots are zero, although x is not. Only the given slots are read or written."""
    (weight, bias), state_len = taps(4), 6
    slots = torch.tensor([7, -1, 2, -1, 0, -3], dtype=index_dtype)
    rows, valid = slots >= 0, slots[slots >= 0].long()
    x = randn(6, DIM, *([] if tokens is None else [tokens]))
    x[~rows] = torch.nan
    pool = torch.full((SLOTS, DIM, state_len), torch.nan)
    pool[valid] = randn(3, DIM, state_len, seed=9)
    before, alone = pool.clone(), pool[valid].clone()
    seen = torch.tensor([4, 99, 1, -5, 17, 0], dtype=torch.int32) if circular else None
    out = causal_conv1d_update(x, pool, weight, bias, "silu", seen, slots)
    want = causal_conv1d_update(x[rows], alone, weight, bias, "silu", seen[rows] if circular else None)
    assert torch.equal(out[rows], want) and (out[~rows] == 0).all(), "not what the same rows alone give"
    if not circular:
        new = x[rows].reshape(3, DIM, -1)
        assert close(out[rows].reshape(new.shape), conv(before[valid], new, weight, bias, "silu"))
        alone = torch.cat([before[valid], new], -1)[..., -state_len:]
    assert torch.equal(pool[valid], alone)
    pool[valid] = before[valid]
    assert pool.equal(before) or torch.equal(pool.isnan(), before.isnan()), "another slot was written"


def test_update_dtypes():
    for x_dtype in (F32, F16, BF16):
        for weight_dtype in (F32, F16, BF16):
            x, start, (weight, bias) = randn(2, DIM, dtype=x_dtype), randn(2, DIM, 3, seed=3, dtype=x_dtype), taps(4, weight_dtype)
            state = start.clone()
            out = causal_conv1d_update(x, state, weight, bias, "silu")
            assert out.dtype == x_dtype and close(out[..., None], conv(start, x[..., None], weight, bias, "silu"))
            assert torch.equal(state, torch.cat([start[..., 1:], x[..., None]], -1))


# causal_conv1d_varlen_states.


def last_tokens(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    states = x.new_zeros(len(cu_seqlens) - 1, x.shape[1], state_len)
    for state, (start, end) in zip(states, pairwise(cu_seqlens.tolist()), strict=True):
        kept = min(end - start, state_len)
        state[:, state_len - kept :] = x[end - kept : end].t()
    return states


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_varlen_states(dtype, index_dtype):
    lengths = torch.randint(1, 32, (100,), generator=torch.Generator().manual_seed(0))
    cu_seqlens = pad(lengths.cumsum(0), (1, 0)).to(index_dtype)
    x = randn(int(lengths.sum()), DIM, dtype=dtype)
    want = last_tokens(x, cu_seqlens, 20)
    got = causal_conv1d_varlen_states(x, cu_seqlens, 20)
    assert got.dtype == dtype and torch.equal(got, want) and got.stride(1) == 1
    assert torch.equal(causal_conv1d_varlen_states(laid_out(x[None], "strided")[0], cu_seqlens, 20), want)
    assert torch.equal(causal_conv1d_varlen_states(laid_out(x[None], "channel-last-slice")[0], cu_seqlens, 20), want)


def test_varlen_states_are_of_their_sequence_alone():
    """This also holds for sequences without tokens. Zeros stay zeros, whatever the neighbouring tokens are."""
    cu_seqlens = torch.tensor([0, 0, 2, 2, 7, 8, 8])
    x = randn(8, DIM)
    x[2:7] = torch.nan
    got = causal_conv1d_varlen_states(x, cu_seqlens, 3)
    assert not got[[0, 2, 5]].any() and got[3].isnan().all()
    assert torch.equal(got[1], pad(x[:2].t(), (1, 0))) and torch.equal(got[4], pad(x[7:].t(), (2, 0)))
    nothing = causal_conv1d_varlen_states(x[:0], torch.zeros(4, dtype=torch.int32), 3)
    assert nothing.shape == (3, DIM, 3) and not nothing.any()
    assert causal_conv1d_varlen_states(x, cu_seqlens, 0).shape == (6, DIM, 0)


def test_varlen_states_never_asks_for_values():
    with FakeTensorMode():  # whose tensors have none
        got = causal_conv1d_varlen_states(torch.empty(50, DIM), torch.empty(5, dtype=torch.int32), 3)
    assert got.shape == (4, DIM, 3)


def test_varlen_states_start_a_decode():
    cu_seqlens, (weight, bias) = torch.tensor([0, 1, 9, 11], dtype=torch.int32), taps(4)
    x, more = randn(11, DIM), randn(3, DIM, seed=4)
    state = causal_conv1d_varlen_states(x, cu_seqlens, 3)
    out = causal_conv1d_update(more, state, weight, bias)
    for s, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        history = torch.cat([torch.zeros(DIM, 3), x[start:end].t()], -1)
        assert close(out[s, :, None], conv(history, more[s, :, None], weight, bias))


# Calls that cannot be served.

X, (W, BIAS) = randn(2, DIM, 5), taps(4)


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [
        *((NotImplementedError, lambda a=a: causal_conv1d_fn(X, W, activation=a), repr(a)) for a in ("gelu", True, "SiLU")),
        (NotImplementedError, lambda: causal_conv1d_update(X, X.clone(), W, activation="relu"), "'relu'"),
        (ArgumentError, lambda: causal_conv1d_fn(X.clone().requires_grad_(), W), "x requires grad"),
        (ArgumentError, lambda: causal_conv1d_fn(X, W.clone().requires_grad_(), BIAS.clone().requires_grad_()), "weight requires grad"),
        (ArgumentError, lambda: causal_conv1d_fn(X, W, initial_states=torch.zeros(2, DIM, 4)), "initial_states is"),
        (ArgumentError, lambda: causal_conv1d_fn(X, W, None, None, None, True, torch.zeros(1, DIM, 3)), "final_states_out is"),
        (ArgumentError, lambda: causal_conv1d_fn(X[0], W), r"x is \[12, 5\]; expected \[batch, dim, length\]"),
        (ArgumentError, lambda: causal_conv1d_fn(X, W, seq_idx=torch.zeros(2, 5, dtype=torch.int64)), "seq_idx is int64"),
        (ArgumentError, lambda: causal_conv1d_update(X, torch.zeros(2, DIM, 2), W), "of state_len 2; expected width - 1 = 3 or more"),
        (ArgumentError, lambda: causal_conv1d_update(X, torch.zeros(1, DIM, 3), W), "conv_state has 1 slots; expected 2, one per sequence"),
        (ArgumentError, lambda: causal_conv1d_update(X, torch.zeros(2, DIM, 3, dtype=BF16), W), "conv_state is bfloat16"),
        (ArgumentError, lambda: causal_conv1d_varlen_states(X, torch.tensor([0, 5]), 3), r"x is \[2, 12, 5\] and cu_seqlens \[2\]; "
            r"expected \[total, dim\] and \[batch \+ 1\]"),
    ],
)  # fmt: skip
def test_says_why_not(error, call, words):
    with pytest.raises(error, match=words):
        call()


def test_parameters_are_welcome_without_grad():
    weight, bias = torch.nn.Parameter(W), torch.nn.Parameter(BIAS)
    with torch.no_grad():
        out = causal_conv1d_fn(X, weight, bias)
        assert not out.requires_grad and close(out, conv(zeros_before(X, 4), X, W, BIAS))
        assert not causal_conv1d_update(X, torch.zeros(2, DIM, 3), weight, bias).requires_grad
