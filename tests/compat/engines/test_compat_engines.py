"""vLLM's and SGLang's Mamba and convolutions as these call them, through their replaced names, against the mathematics in float64."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, pages, poisoned, sglang_functions, vllm_functions  # noqa: F401
from test_compat_ssu import close as ssu_close
from test_compat_ssu import operands, states, token
from test_engine_forms import same, starts_of, stored
from torch_conv import DIM, close, conv, randn, taps

from ssmgen.compat import sglang as sglang_plugin

F16 = torch.float16

# selective_state_update


@pytest.mark.parametrize("table", [1, 3], ids=["a column", "columns"])
def test_vllm_decode_step_of_mamba2(vllm, table):
    """Slots [sequences or more, columns], the same for reading and writing; A, D, dt and dt_bias expanded; x a part of a wider row."""
    x, slots = operands(4), torch.tensor([3, 0, 6, -1, 9, 9], dtype=torch.int32)[:, None].repeat(1, table)
    state = pages(8, *states().shape[1:])
    before, out = state.clone(), poisoned(4, 2 * 4, 8)[:, ::2]
    wide = torch.cat([x["x"].flatten(1), randn(4, 7)], 1)[:, : 4 * 8].unflatten(1, (4, 8))
    got = vllm.selective_state_update(
        state, wide, x["dt"], x["A"], x["B"], x["C"], x["D"], dt_bias=x["dt_bias"], dt_softplus=True, state_batch_indices=slots,
        dst_state_batch_indices=slots, out=out, num_accepted_tokens=None, cu_seqlens=None, is_blackwell=True,
    )  # fmt: skip
    x |= {"z": torch.full_like(x["x"], 30.0)}  # whose silu is itself
    assert got is None and not out[[1, 3]].any()
    for b in (0, 2):
        new, y = token(before[slots[b, 0]].double(), x, b)
        assert ssu_close(out[b], y / 30) and ssu_close(state[slots[b, 0]], new)
        state[slots[b, 0]] = before[slots[b, 0]]
    assert torch.equal(state, before), "another slot was written"


def test_vllm_state_goes_to_another_slot(vllm):
    x, state = operands(3), states()
    before, out = state.clone(), poisoned(3, 4, 8)
    read, write = torch.tensor([[1], [2], [3]], dtype=torch.int32), torch.tensor([[1], [9], [0]], dtype=torch.int32)
    vllm.selective_state_update(
        state, x["x"], x["dt"], x["A"], x["B"], x["C"], x["D"], x["dt_bias"], x["z"], True, read, write, out=out
    )  # fmt: skip
    want = before.double()
    for b, slot in enumerate(write.flatten().tolist()):
        new, y = token(before[read[b, 0]].double(), x, b)
        assert ssu_close(out[b], y)
        if slot:
            want[slot] = new
    assert ssu_close(state, want)


@pytest.mark.parametrize("packed", [True, False])
def test_vllm_speculative_steps(vllm, packed):
    """Reads the last accepted token's column (0 is like 1) and writes a column per token; buffers are longer than the batch."""
    lengths, accepted = [3, 1, 0, 2] if packed else [1] * 4, torch.tensor([2, 0, 1, 3])
    table = torch.arange(1, 1 + 5 * 3, dtype=torch.int32).view(5, 3)
    table[1, 1:], table[3, 1] = 0, 0
    x, state, out = operands(sum(lengths)), states(), poisoned(sum(lengths), 4, 8)
    before = state.clone()
    vllm.selective_state_update(
        state, x["x"], x["dt"], x["A"], x["B"], x["C"], x["D"], x["dt_bias"], x["z"], True, table, table, out=out,
        num_accepted_tokens=accepted, cu_seqlens=starts_of(lengths) if packed else None,
    )  # fmt: skip
    want = before.double()
    for b, (start, stop) in enumerate(pairwise(starts_of(lengths).tolist())):
        S = before[table[b, max(int(accepted[b]) - 1, 0)]].double()
        for t in range(start, stop):
            S, y = token(S, x, t)
            assert ssu_close(out[t], y)
            if slot := int(table[b, t - start]):
                want[slot] = S
    assert ssu_close(state, want)


def test_vllm_decode_step_of_mamba1(vllm):
    """No heads, a separate A for each row, the gate in the kernel, and transposed views."""
    batch, dim, N = 3, 10, 16
    x, dt, z = (randn(dim, batch, seed=s).t() for s in (1, 2, 3))
    A, B, C, D, bias = -randn(dim, N).abs(), randn(batch, N, seed=4), randn(batch, N, seed=5), randn(dim), randn(dim, seed=6)
    state, slots = pages(6, dim, N), torch.tensor([[4], [0], [2]], dtype=torch.int32)
    before, out = state.clone(), poisoned(dim, batch).t()
    vllm.selective_state_update(
        state, x, dt, A, B, C, D, bias, z=z, dt_softplus=True, state_batch_indices=slots, dst_state_batch_indices=slots, out=out
    )
    assert not out[1].any() and torch.equal(state[[0, 1, 3, 5]], before[[0, 1, 3, 5]])
    for b in (0, 2):
        step = (dt[b].double() + bias).exp().log1p()
        new = before[slots[b, 0]].double() * (step[:, None] * A).exp() + (step * x[b])[:, None] * B[b].double()
        y = (new @ C[b].double() + D * x[b].double()) * z[b].double() * z[b].double().sigmoid()
        assert ssu_close(out[b], y) and ssu_close(state[slots[b, 0]], new)


@pytest.mark.parametrize("tied", [False, True], ids=["A of its own", "A of a head"])
def test_sglang_decode_step_of_mamba1(sglang, monkeypatch, tied):
    """SGLang's channels are heads of one row; ours are rows of one head, so that no head is a separate block."""
    batch, dim, N, seen = 3, 10, 16, []
    x, dt, z = (randn(batch, dim, 1, seed=s) for s in (1, 2, 3))
    A = -randn(dim).abs() if tied else -randn(dim, 1, N).abs()
    B, C, D = randn(batch, 1, N, seed=4), randn(batch, 1, N, seed=5), randn(dim, 1)
    state, slots, out = pages(6, dim, 1, N), torch.tensor([4, -1, 2], dtype=torch.int32), poisoned(batch, dim, 1)
    before, run = state.clone(), sglang_plugin._ssu
    monkeypatch.setattr(sglang_plugin, "_ssu", lambda *given, **more: seen.append(given[1].shape) or run(*given, **more))
    sglang.selective_state_update(
        state, x, dt, A, B, C, D, z=z, dt_bias=torch.zeros(dim, 1), dt_softplus=True, state_batch_indices=slots, out=out
    )
    assert seen == [(batch, dim)] and not out[1].any() and torch.equal(state[[0, 1, 3, 5]], before[[0, 1, 3, 5]])
    decay = A.double().view(dim, -1)
    for b in (0, 2):
        step = dt[b, :, 0].double().exp().log1p()
        new = before[slots[b], :, 0].double() * (step[:, None] * decay).exp() + (step * x[b, :, 0])[:, None] * B[b].double()
        y = ((new * C[b]).sum(-1) + D[:, 0] * x[b, :, 0].double()) * z[b, :, 0].double() * z[b, :, 0].double().sigmoid()
        assert ssu_close(out[b, :, 0], y) and ssu_close(state[slots[b], :, 0], new)


@pytest.mark.parametrize("rounds", [0, 5])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_states_are_rounded_stochastically(request, engine, rounds):
    x, state, slots = operands(4), states(dtype=F16), torch.tensor([3, 1, 2, 6], dtype=torch.int32)
    before = state.clone()
    request.getfixturevalue(engine).selective_state_update(
        state, x["x"], x["dt"], x["A"], x["B"], x["C"], D=x["D"], dt_bias=x["dt_bias"], z=x["z"], dt_softplus=True,
        state_batch_indices=slots, out=poisoned(4, 4, 8), enable_stochastic_rounding=True, cache_philox_rounds=rounds,
    )  # fmt: skip
    exact = torch.stack([token(before[slot].double(), x, b)[0] for b, slot in enumerate(slots)])
    got = state[slots.long()]
    assert (got.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(F16).eps
    assert not torch.equal(got, exact.half()), "to nearest"


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rows", [True, False], ids=["by row", "by slot"])
def test_sglang_verifies_drafts(sglang, tree, rows):
    """States after each token are kept in rows of a buffer; the pool is only read. Buffers are longer than the batch."""
    T, slots = 4, torch.tensor([3, -1, 6], dtype=torch.int32)
    x, state, kept = operands(3, T), states(), torch.zeros(20, T, *states().shape[1:])
    before, out = state.clone(), poisoned(3, T, 4, 8)
    parents = torch.tensor([[-1, 0, 0, 1], [0, 0, 1, 2], [0, 0, 1, 0]]) if tree else None
    sglang.selective_state_update(
        state, x["x"], x["dt"], x["A"], x["B"], x["C"], x["D"], z=x["z"], dt_bias=x["dt_bias"], dt_softplus=True,
        state_batch_indices=slots, out=out, disable_state_update=True, intermediate_states_buffer=kept, cache_steps=T,
        retrieve_parent_token=parents, intermediate_state_indices=torch.tensor([7, 1, 0, 5]) if rows else None,
    )  # fmt: skip
    want = torch.zeros_like(kept, dtype=torch.float64)
    for b in (0, 2):
        S, each = before[slots[b]].double(), []
        for t in range(T):
            S, y = token(each[int(parents[b, t])] if tree and t else S, x, b, t)
            each.append(S)
            assert ssu_close(out[b, t], y)
        want[[7, 1, 0][b] if rows else int(slots[b])] = torch.stack(each)
    assert torch.equal(state, before) and ssu_close(kept, want) and not out[1].any()


# The convolution


@pytest.mark.parametrize("how", ["in_place", "out", "tokens"])
def test_vllm_convolution_of_a_step(vllm, how):
    """Slots [sequences, columns]; only the first entries of a longer state are the history, and the others stay."""
    weight, bias = taps(4)
    slots = torch.tensor([[4, 7], [0, 3], [2, 1]], dtype=torch.int32)
    pool, before = stored(9, 5)
    x = randn(3, DIM, 2) if how == "tokens" else randn(3, 2 * DIM)[:, :DIM]
    tokens, out = (x if how == "tokens" else x[..., None]).clone(), torch.empty(3, DIM) if how == "out" else None
    got = vllm.causal_conv1d_update(
        x, pool, weight, bias, "silu", conv_state_indices=slots if how == "tokens" else slots[:, 0], validate_data=True, out=out
    )
    assert got is (x if out is None else out)
    want = before.clone()
    for b, slot in enumerate(slots[:, 0].tolist()):
        y = got[b] if how == "tokens" else got[b, :, None]
        if slot == 0:
            assert not y.any()
            continue
        assert close(y, conv(before[slot, :, :3], tokens[b], weight, bias, "silu"))
        want[slot, :, :3] = torch.cat([before[slot, :, :3], tokens[b]], 1)[:, -3:]
    assert same(pool, want)


def test_vllm_convolution_of_drafts(vllm):
    """Packed, with these counts of accepted tokens; all buffers are longer than the batch."""
    weight, bias = taps(4)
    lengths, accepted = [3, 1, 0, 2], torch.tensor([2, 1, 3, 1, 7])
    slots = torch.tensor([4, 2, 7, 0], dtype=torch.int32)
    pool, before = stored(9, 5)
    x = randn(sum(lengths), DIM)
    pieces = x.clone().t().split(lengths, 1)
    out = vllm.causal_conv1d_update(
        x, pool, weight, bias, True, conv_state_indices=slots, num_accepted_tokens=accepted, max_query_len=3,
        query_start_loc=torch.cat([starts_of(lengths), torch.tensor([6, 6])]).int(),
    )  # fmt: skip
    assert out is x
    for b, got in enumerate(out.t().split(lengths, 1)):
        history = before[slots[b]][:, accepted[b] - 1 :][:, :3]
        if lengths[b] and slots[b]:
            assert close(got, conv(history, pieces[b], weight, bias, "silu"))
            new = torch.cat([history[:, 1:], pieces[b]], 1)
            assert torch.equal(pool[slots[b], :, : new.shape[1]], new)
    assert not out[4:].any() and same(pool[[0, 1, 3, 5, 6, 7, 8]], before[[0, 1, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_convolution_of_prompts(request, engine):
    weight, bias = taps(4)
    pad = {"vllm": 0, "sglang": -1}[engine]
    lengths, slots, started = (
        [5, 1, 4, 2],
        torch.tensor([3, pad, 4, 5, 8], dtype=torch.int32),
        torch.tensor([True, True, False, True, True]),
    )
    x = randn(sum(lengths), DIM).t()
    pool, before = stored(9, 4)
    blocks = torch.tensor([[i, 0] for i in range(len(lengths))], dtype=torch.int32)
    more = {"metadata": object()} if engine == "vllm" else {"seq_lens_cpu": lengths, "block_table": blocks}
    out = request.getfixturevalue(engine).causal_conv1d_fn(
        x, weight, bias, activation="silu", conv_states=pool, has_initial_state=started, cache_indices=slots,
        query_start_loc=starts_of(lengths), **more,
    )  # fmt: skip
    want = before.clone()
    assert out.shape == x.shape and out is not x
    for got, piece, slot, go_on in zip(out.split(lengths, 1), x.split(lengths, 1), slots.tolist(), started.tolist(), strict=False):
        if slot == pad:
            assert not got.any()
            continue
        history = before[slot, :, :3] if go_on else torch.zeros(DIM, 3)
        assert close(got, conv(history, piece, weight, bias, "silu"))
        want[slot, :, :3] = torch.cat([history, piece], 1)[:, -3:]
    assert same(pool, want)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_parameters_with_autograd_on(request, engine):
    """SGLang's one_batch records its CUDA graphs so."""
    weight, bias = map(torch.nn.Parameter, taps(4))
    pool, before = stored(9, 3)
    tokens, slots = randn(2, DIM), torch.tensor([4, 2], dtype=torch.int32)
    x = tokens.clone().requires_grad_() * 1  # as a projection by parameters gives it
    step = request.getfixturevalue(engine).causal_conv1d_update
    out = step(x, pool, weight, bias, "silu", conv_state_indices=slots)
    assert torch.is_grad_enabled() and not pool.requires_grad
    for b, slot in enumerate(slots):
        assert close(out.detach()[b, :, None], conv(before[slot], tokens[b, :, None], weight.detach(), bias.detach(), "silu"))


@pytest.mark.parametrize("which", ["causal_conv1d_update", "causal_conv1d_update_triton"])
def test_sglang_convolution_of_a_step(sglang, which):
    """The layers' function overwrites x; the other one does not."""
    weight, bias = taps(4)
    pool, before = stored(9, 3)
    x, slots = randn(3, DIM), torch.tensor([4, -1, 2], dtype=torch.int64)
    tokens = x.clone()
    out = getattr(sglang, which)(x, pool, weight, bias, "silu", conv_state_indices=slots)
    assert (out is x) == (which == "causal_conv1d_update") and (out is x or torch.equal(x, tokens)) and not out[1].any()
    for b in (0, 2):
        assert close(out[b, :, None], conv(before[slots[b]], tokens[b, :, None], weight, bias, "silu"))
        before[slots[b]] = torch.cat([before[slots[b]], tokens[b, :, None]], 1)[:, 1:]
    assert same(pool, before)


def test_sglang_convolution_keeps_windows_of_drafts(sglang):
    weight, bias = taps(4)
    pool, before = stored(9, 3)
    x, slots, windows = randn(2, DIM, 3), torch.tensor([4, 2], dtype=torch.int32), torch.zeros(5, 3, DIM, 3)
    out = sglang.causal_conv1d_update_triton(
        x,
        pool,
        weight,
        bias,
        "silu",
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=torch.tensor([3, 0, 1]),
    )
    for b in range(2):
        inputs = torch.cat([before[slots[b]], x[b]], 1)
        assert close(out[b], conv(before[slots[b]], x[b], weight, bias, "silu"))
        assert torch.equal(windows[[3, 0][b]], inputs.unfold(1, 3, 1)[:, 1:].transpose(0, 1)) and torch.equal(pool[slots[b]], inputs[:, 3:])
    assert not windows[[1, 2, 4]].any()


@pytest.mark.parametrize(("children", "siblings", "parents"), [
    ([1, 3, -1, -1], [-1, 2, -1, -1], [0, 0, 0, 1]), ([1, 2, 3, -1], [-1, -1, -1, -1], [0, 0, 1, 2]),
    ([1, 5, 6, -1, -1, -1, -1, -1], [-1, 2, 3, 4, -1, -1, 7, -1], [0, 0, 0, 0, 0, 1, 2, 2]), ([-1], [-1], [0]),
])  # fmt: skip
def test_sglang_convolution_along_draft_trees(sglang, children, siblings, parents):
    """Children and siblings are given, parents written; a token's window is its ancestors'. Buffers are longer than the batch."""
    weight, bias = taps(4)
    pool, before = stored(9, 3)
    T = len(children)
    x, slots, windows = randn(2, DIM, T), torch.tensor([4, 2], dtype=torch.int32), torch.zeros(5, T, DIM, 3)
    tree = {n: torch.tensor([v] * 3, dtype=torch.int32) for n, v in (("next_token", children), ("next_sibling", siblings))}
    written = torch.full((3, T), 77, dtype=torch.int32)
    out = sglang.causal_conv1d_update_triton(
        x, pool, weight, bias, "silu", conv_state_indices=slots, intermediate_conv_window=windows,
        intermediate_state_indices=torch.tensor([3, 0, 1]), retrieve_next_token=tree["next_token"],
        retrieve_next_sibling=tree["next_sibling"], retrieve_parent_token=written,
    )  # fmt: skip
    assert written.tolist() == [parents, parents, [77] * T]
    for b, t in product(range(2), range(T)):
        path = [t]
        while path[0] > 0:
            path.insert(0, parents[path[0]])
        inputs = torch.cat([before[slots[b]], x[b][:, path]], 1)[:, -4:]
        assert close(out[b, :, t : t + 1], conv(inputs[:, :3], inputs[:, 3:], weight, bias, "silu"))
        assert torch.equal(windows[[3, 0][b], t], inputs[:, 1:])
