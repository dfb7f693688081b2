"""How vLLM and SGLang call the convolution, against torch.nn.functional.conv1d in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch_conv import BF16, DIM, F32, close, conv, randn, taps

import ssmgen

SLOTS = 9

# vLLM and SGLang: pools of states stored [slots, width - 1 or more, dim] and passed transposed, by the native functions' arguments.


def stored(slots: int, entries: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    """(the pool, transposed; a copy). Slot 0 is NaN: nothing may read it."""
    pool = randn(slots, entries, DIM, seed=11, dtype=dtype)
    pool[0] = torch.nan
    return pool.transpose(1, 2), pool.transpose(1, 2).clone()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def starts_of(lengths: list[int]) -> Tensor:
    return pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


@pytest.mark.parametrize("pad_slot_id", [-1, 0])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layout", ["token-major", "channel-major"])
@pytest.mark.parametrize("width", [2, 4])
def test_prefill(pad_slot_id, dtype, layout, width):
    """x (dim, total). Unlike in vLLM, the outputs of padding are zeros."""
    weight, bias = taps(width)
    lengths, slots = [5, 1, 4, 0, 2, 30, 3], [3, 8, pad_slot_id, 5, 1, 6, pad_slot_id]
    started = [True, True, True, True, False, False, False]
    x = randn(sum(lengths), DIM, dtype=dtype).t()
    x = x if layout == "token-major" else x.contiguous()
    pool, before = stored(SLOTS, width - 1, dtype)
    out = ssmgen.causal_conv1d(
        x, weight, bias, activation="silu", query_start_loc=starts_of(lengths), conv_states=pool,
        conv_state_indices=torch.tensor(slots, dtype=torch.int32), has_initial_state=torch.tensor(started), pad_slot_id=pad_slot_id,
    )  # fmt: skip
    assert out.shape == x.shape and out.dtype == dtype
    want = before.clone()
    for piece, got, slot, go_on in zip(x.split(lengths, 1), out.split(lengths, 1), slots, started, strict=True):
        if slot == pad_slot_id:
            assert not got.any()
            continue
        history = before[slot] if go_on else torch.zeros_like(before[slot])
        assert close(got, conv(history, piece, weight, bias, "silu"))
        if piece.shape[1]:
            want[slot] = torch.cat([history, piece], 1)[:, piece.shape[1] :]
    assert same(pool, want)


@pytest.mark.parametrize("pad_slot_id", [-1, 0])
@pytest.mark.parametrize("activation", ["silu", True, None])
@pytest.mark.parametrize("form", ["batch-dim", "batch-dim-T", "packed"])
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in_place"])
def test_decode(pad_slot_id, activation, form, in_place):
    """x (batch, dim), (batch, dim, T) or packed (total, dim), with the pool's slots and padding."""
    weight, bias = taps(4)
    slots, lengths = [4, pad_slot_id, 7, 2, pad_slot_id], [1] * 5 if form == "batch-dim" else [3] * 5
    if form == "packed":
        lengths = [2, 3, 1, 0, 2]
    tokens = randn(sum(lengths), DIM, seed=6)
    x = tokens.reshape(5, 3, DIM).mT.clone() if form == "batch-dim-T" else tokens.clone()
    pieces = tokens.split(lengths)
    pool, before = stored(SLOTS, 3)
    out = ssmgen.causal_conv1d_update(
        x, pool, weight, bias, activation, conv_state_indices=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=starts_of(lengths) if form == "packed" else None, pad_slot_id=pad_slot_id, out=x if in_place else None,
    )  # fmt: skip
    assert out.shape == x.shape and (out is x) == in_place
    each, want = out.mT.flatten(0, 1) if form == "batch-dim-T" else out, before.clone()
    for piece, got, slot in zip(pieces, each.split(lengths), slots, strict=True):
        if slot == pad_slot_id:
            assert not got.any()
        else:
            assert close(got.t(), conv(before[slot], piece.t(), weight, bias, activation))
            want[slot] = torch.cat([before[slot], piece.t()], 1)[:, len(piece) :]
    assert same(pool, want)


@pytest.mark.parametrize("form", ["batch-dim-T", "packed"])
@pytest.mark.parametrize("pad_slot_id", [-1, 0])
@pytest.mark.parametrize("spare", [0, 2])
def test_speculative_decoding_is_the_convolution_of_what_was_accepted(form, pad_slot_id, spare):
    """Prefill into the first entries of longer states, then steps of drafts; the next step accepts a random number of them."""
    made, width, T = torch.Generator().manual_seed(spare), 4, 4
    weight, bias = taps(width)
    slots = torch.tensor([3, pad_slot_id, 5, 1], dtype=torch.int32)
    real = [0, 2, 3]
    pool, _ = stored(SLOTS, width - 1 + T - 1 + spare)
    lengths = [6, 2, 1, 9]
    prompt = randn(sum(lengths), DIM, seed=8).t()
    ssmgen.causal_conv1d(
        prompt, weight, bias, query_start_loc=starts_of(lengths), conv_states=pool[..., : width - 1], conv_state_indices=slots,
        pad_slot_id=pad_slot_id,
    )  # fmt: skip
    accepted = {s: [t] for s, t in enumerate(prompt.split(lengths, 1))}  # all inputs that were
    counts = torch.ones(4, dtype=torch.int32)
    for step in range(12):
        drafts = torch.randint(0, T + 1, (4,), generator=made).tolist() if form == "packed" else [T] * 4
        x = randn(sum(drafts), DIM, seed=100 + step)
        pieces = x.split(drafts)
        others = pool[[0, 2, 4, 6, 7, 8]].clone()
        call = {"num_accepted_tokens": counts, "conv_state_indices": slots, "pad_slot_id": pad_slot_id, "activation": "silu"}
        if form == "packed":
            out = ssmgen.causal_conv1d_update(x, pool, weight, bias, query_start_loc=starts_of(drafts), **call).split(drafts)
        else:
            out = ssmgen.causal_conv1d_update(x.reshape(4, T, DIM).mT, pool, weight, bias, **call).mT
        assert not out[1].any()
        for s in real:
            history = torch.cat([torch.zeros(DIM, width - 1), *accepted[s]], 1)
            assert close(out[s].t(), conv(history, pieces[s].t(), weight, bias, "silu"))
            if drafts[s]:  # a sequence without tokens is left alone
                counts[s] = torch.randint(1, drafts[s] + 1, (), generator=made)
                accepted[s].append(pieces[s][: counts[s]].t())
        assert same(pool[[0, 2, 4, 6, 7, 8]], others), "another slot was written"


@pytest.mark.parametrize("chosen", [False, True], ids=["by_sequence", "by_index"])
def test_windows_after_each_token(chosen):
    """SGLang's intermediate_conv_window [rows, T or more, dim, width - 1]: the history after each of the drafts."""
    weight, bias = taps(4)
    slots, rows = torch.tensor([4, -1, 7], dtype=torch.int32), torch.tensor([5, 1, 0], dtype=torch.int32)
    x, windows = randn(3, DIM, 3), torch.full((6, 4, DIM, 3), 5.0)
    pool, before = stored(SLOTS, 3)
    out = ssmgen.causal_conv1d_update(
        x, pool, weight, bias, "silu", conv_state_indices=slots, intermediate_conv_window=windows,
        intermediate_state_indices=rows if chosen else None, pad_slot_id=-1,
    )  # fmt: skip
    want = torch.full_like(windows, 5.0)
    for s in (0, 2):
        inputs = torch.cat([before[slots[s]], x[s]], 1)
        assert close(out[s], conv(before[slots[s]], x[s], weight, bias, "silu"))
        want[rows[s] if chosen else s, :3] = inputs.unfold(1, 3, 1)[:, 1:].transpose(0, 1)
        assert torch.equal(pool[slots[s]], inputs[:, 3:])
    assert torch.equal(windows, want)
