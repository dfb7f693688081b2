"""vLLM's and SGLang's functions as these call them, through the names that their plugins replace, against the mathematics in float64."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from engine_signatures import IMPORTS, SIGNATURES
from engine_stand_ins import importable, write
from test_compat_ssu import close as ssu_close
from test_compat_ssu import operands, states, token
from test_engine_forms import same, starts_of, stored
from torch import Tensor
from torch_conv import DIM, F32, close, conv, randn, taps

from ssmgen.compat import sglang, vllm

F16, BF16 = torch.float16, torch.bfloat16


def replaced(tmp_path, monkeypatch, plugin, package: str):
    """The engine's functions by name, as its layers hold them."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("SSMGEN_ENGINE_KEEP", raising=False)
    write(tmp_path, package)
    with importable(tmp_path, package):
        plugin.register()
        found = SimpleNamespace()
        for module, name in SIGNATURES:
            if module.startswith(f"{package}."):
                setattr(found, name, getattr(import_module(module), name))
        for module in IMPORTS:
            if module.startswith(f"{package}.") and not module.endswith("ssu_dispatch"):
                vars(found).update({n: f for n, f in vars(import_module(module)).items() if callable(f) and hasattr(f, "__wrapped__")})
        yield found
        plugin.unregister()


@pytest.fixture(name="vllm")
def _vllm(tmp_path, monkeypatch):
    yield from replaced(tmp_path, monkeypatch, vllm, "vllm")


@pytest.fixture(name="sglang")
def _sglang(tmp_path, monkeypatch):
    """causal_conv1d_update is that of the layers, causal_conv1d_update_triton the other."""
    for engine in replaced(tmp_path, monkeypatch, sglang, "sglang"):
        engine.causal_conv1d_update = import_module("sglang.srt.models.lfm2").causal_conv1d_update
        yield engine


@pytest.fixture(autouse=True)
def _no_call_goes_to_the_engine(request, caplog):
    yield
    said = [r.getMessage() for r in caplog.get_records("call") if "'s own" in r.getMessage()]
    assert bool(said) == (request.node.get_closest_marker("refused") is not None), said


def poisoned(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def pages(n: int, *inner: int, dtype: torch.dtype = F32, gap: int = 5) -> Tensor:
    """A pool whose slots are parts of larger pages, as engines lay them out; NaN between them."""
    size = torch.Size(inner).numel()
    pool = poisoned(n, size + gap, dtype=dtype)[:, :size].unflatten(1, inner)
    return pool.copy_(randn(n, *inner, seed=9))


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
    """From the last accepted token's column (0 is like 1) to a column per token; buffers are longer than the batch."""
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
    """No heads, A of its own for each row, the gate in the kernel, and transposed views."""
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
    """Packed, after so many accepted tokens; all buffers are longer than the batch."""
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
    more = {"metadata": object()} if engine == "vllm" else {"seq_lens_cpu": lengths, "block_table": None}
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


# Gated delta rules

HK, HV, K, V = 2, 4, 12, 20


def gdn_operands(*lead: int, kda: bool = False) -> dict[str, Tensor]:
    """q, k, v; the raw gate a and the logit b of beta; A_log and dt_bias."""
    gate = (HV, K) if kda else (HV,)
    x = {n: randn(*lead, heads, width, seed=s) for s, (n, heads, width) in enumerate((("q", HK, K), ("k", HK, K), ("v", HV, V)))}
    x |= {"a": randn(*lead, *gate, seed=5), "b": randn(*lead, HV, seed=6)}
    return x | {"A_log": randn(HV, seed=7) / 4, "dt_bias": randn(*gate, seed=8).flatten()}


def delta_token(
    S: Tensor, x: dict[str, Tensor], *at: int, scale: float = K**-0.5, lower_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """(states [HV, V, K], outputs [HV, V]) after a token, in float64, of raw gates, logits, and q and k of length one."""
    q, k, v, a, b = (x[n][at].double() for n in "qkvab")
    q, k = ((t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(HV // HK, 0) for t in (q, k))
    raw, A = a + x["dt_bias"].double().view(a.shape), x["A_log"].double().exp().view(HV, *[1] * (a.dim() - 1))
    g = -A * raw.exp().log1p() if lower_bound is None else lower_bound * (A * raw).sigmoid()
    S = S * g.exp().view(HV, 1, -1)
    S = S + (b.sigmoid()[:, None] * (v - (S * k[:, None]).sum(-1)))[..., None] * k[:, None]
    return S, scale * (S * q[:, None]).sum(-1)


def near(got: Tensor, want: Tensor) -> bool:
    """Within a rounding to the dtype and those of a few f32 sums."""
    bound = (want.abs().max().item() + 1) * (torch.finfo(got.dtype).eps / 2 + 8 * (K + 8) * torch.finfo(F32).eps)
    return got.shape == want.shape and (got.double() - want).abs().max().item() <= bound


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_packed_decode(request, engine, dtype):
    """mixed_qkv and the gates are parts of wider rows. For vLLM, slot 0 is padding too."""
    x, slots = gdn_operands(4), torch.tensor([5, 0, -1, 2], dtype=torch.int32)
    rows = [torch.cat([*(x[n].flatten(1) for n in "qkv"), randn(4, 3)], 1).to(dtype), torch.cat([x["b"], x["a"]], 1).to(dtype)]
    mixed, b, a = rows[0][:, :-3], rows[1][:, :HV], rows[1][:, HV:]
    x |= {n: t.float() for n, t in zip("qkvab", (*(t.to(dtype) for t in (x["q"], x["k"], x["v"])), a, b), strict=True)}
    state, out = pages(7, HV, V, K), poisoned(4, 1, HV, V, dtype=dtype)
    before = state.clone()
    got = request.getfixturevalue(engine).fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=mixed, a=a, b=b, A_log=x["A_log"], dt_bias=x["dt_bias"], scale=0.3, initial_state=state, out=out,
        ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert got[0] is out and got[1] is state
    want = before.double()
    for n, slot in enumerate(slots.tolist()):
        if slot < (1 if engine == "vllm" else 0):
            assert not out[n].any()
            continue
        want[slot], y = delta_token(before[slot].double(), x, n, scale=0.3)
        assert near(out[n, 0], y)
    assert near(state, want)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("form", ["drafts", "steps"])
def test_vllm_sigmoid_gating(vllm, form, kda):
    """Drafts: packed, from the last accepted token's column, to a column per token. Steps: one token each, a slot per sequence."""
    lengths, accepted = ([3, 1, 0, 2], torch.tensor([2, 1, 1, 3, 9])) if form == "drafts" else ([1] * 4, None)
    total = sum(lengths)
    x = gdn_operands(total, kda=kda)
    table = torch.arange(1, 16, dtype=torch.int32).view(5, 3)
    table[3, 1] = 0
    slots = table if form == "drafts" else torch.tensor([4, 0, 3, 7, 1], dtype=torch.int32)
    state = pages(17, HV, V, K)
    before = state.clone()
    gate = x["a"].flatten(1) if kda else x["a"]  # [tokens, …], while q has a batch axis
    out, pool = vllm.fused_sigmoid_gating_delta_rule_update(
        A_log=x["A_log"], a=gate, b=x["b"], dt_bias=x["dt_bias"], q=x["q"][None], k=x["k"][None], v=x["v"][None], initial_state=state,
        inplace_final_state=True, cu_seqlens=starts_of(lengths), ssm_state_indices=slots, num_accepted_tokens=accepted,
        use_qk_l2norm_in_kernel=True, is_kda=kda,
    )  # fmt: skip
    assert pool is state and out.shape == (1, total, HV, V)
    want = before.double()
    for n, (start, stop) in enumerate(pairwise(starts_of(lengths).tolist())):
        columns = table[n].tolist() if form == "drafts" else [int(slots[n])]
        slot = columns[int(accepted[n]) - 1] if form == "drafts" else columns[0]
        if slot == 0:
            assert not out[0, start:stop].any()
            continue
        S = before[slot].double()
        for t in range(start, stop):
            S, y = delta_token(S, x, t)
            assert near(out[0, t], y)
            if columns[t - start]:
                want[columns[t - start]] = S
    assert near(state, want)


@pytest.mark.parametrize("form", ["steps", "batch", "table"])
def test_vllm_recurrent_of_gates(vllm, form):
    """As for OLMo: g and beta ready, packed steps; also a batch of tokens without cu_seqlens, and the first column of a table."""
    lead = (1, 3) if form == "steps" else (3, 2) if form == "table" else (3, 1)
    x = gdn_operands(*lead)
    g = -x["A_log"].exp() * (x["a"] + x["dt_bias"]).exp().log1p()
    beta = x["b"].sigmoid()
    slots = torch.tensor([[4, 5], [0, 0], [2, 3]], dtype=torch.int32)
    state = states_of = pages(7, HV, V, K)
    before = state.clone()
    out, _ = vllm.fused_recurrent_gated_delta_rule(
        q=x["q"], k=x["k"], v=x["v"], g=g, beta=beta, initial_state=state, cu_seqlens=starts_of([1] * 3) if form == "steps" else None,
        ssm_state_indices=slots if form == "table" else slots[:, 0], use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    want = before.double()
    for n in (0, 2):
        S = before[slots[n, 0]].double()
        for t in range(lead[1] if form == "table" else 1):
            at = (0, n) if form == "steps" else (n, t)
            S, y = delta_token(S, x, *at)
            want[slots[n, t]] = S
            assert near(out[at], y)
    assert near(states_of, want) and not (out[0, 1] if form == "steps" else out[1]).any()


def test_vllm_recurrent_without_beta(vllm):
    x, state = gdn_operands(2, 1), randn(3, HV, V, K)
    again, slots = state.clone(), torch.tensor([1, 2], dtype=torch.int32)
    call = {"q": x["q"], "k": x["k"] / 4, "v": x["v"], "g": -x["a"].abs(), "ssm_state_indices": slots}
    out, _ = vllm.fused_recurrent_gated_delta_rule(**call, initial_state=state)
    want, _ = vllm.fused_recurrent_gated_delta_rule(**call, beta=torch.ones(2, 1, HV), initial_state=again)
    assert torch.equal(out, want) and torch.equal(state, again)


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("gate", ["gdn", "kda", "bounded"])
def test_sglang_sigmoid_gating(sglang, gate, disabled):
    """One token per sequence, packed; slot 0 is one like others."""
    kda, bound = gate != "gdn", -5.0 if gate == "bounded" else None
    x, slots = gdn_operands(3, kda=kda), torch.tensor([5, -1, 0, 2], dtype=torch.int32)
    state = pages(7, HV, V, K)
    before = state.clone()
    out = sglang.fused_sigmoid_gating_delta_rule_update(
        A_log=x["A_log"].view(1, 1, HV, 1), dt_bias=x["dt_bias"], q=x["q"][None], k=x["k"][None], v=x["v"][None],
        a=x["a"].flatten(1)[None] if kda else x["a"], b=x["b"], initial_state_source=state, initial_state_indices=slots,
        cu_seqlens=starts_of([1] * 3), use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, is_kda=kda,
        lower_bound=bound, disable_state_update=disabled,
    )  # fmt: skip
    want = before.double()
    for n in (0, 2):
        S, y = delta_token(before[slots[n]].double(), x, n, lower_bound=bound)
        assert near(out[0, n], y)
        want[slots[n]] = before[slots[n]].double() if disabled else S
    assert near(state, want) and not out[0, 1].any()


# Merging


def merged(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Of LSEs [tokens, heads], in float64."""
    both = torch.stack([lse_a, lse_b]).double()
    weights = both.softmax(0)[..., None]
    return weights[0] * a + weights[1] * b, both.logsumexp(0)


@pytest.mark.parametrize("with_context", [None, 5, 3, 0])
@pytest.mark.parametrize("lse", [False, True])
def test_vllm_merges_into_the_prefix(vllm, with_context, lse):
    """In place of the prefix, as MLA does; tokens without context take the suffix. LSEs are [heads, tokens], also transposed views."""
    tokens, heads, d = 5, 3, 16
    prefix, suffix = randn(tokens, heads, d), randn(tokens, heads, d, seed=1)
    prefix_lse, suffix_lse = randn(heads, tokens), randn(tokens, heads, seed=1).t()
    want, want_lse = merged(prefix, prefix_lse.t(), suffix, suffix_lse.t())
    n = tokens if with_context is None else with_context
    want[n:], want_lse[n:] = suffix[n:].double(), suffix_lse.t()[n:].double()
    out_lse = poisoned(heads, tokens) if lse else None
    vllm.merge_attn_states(
        output=prefix, prefix_output=prefix, prefix_lse=prefix_lse, suffix_output=suffix, suffix_lse=suffix_lse, output_lse=out_lse,
        prefill_tokens_with_context=with_context,
    )  # fmt: skip
    assert near(prefix, want) and (out_lse is None or near(out_lse.t(), want_lse))


@pytest.mark.parametrize("given", [False, True])
def test_sglang_merges(sglang, given):
    a, b, lse_a, lse_b = randn(5, 3, 16), randn(5, 3, 16, seed=1), randn(5, 3), randn(5, 3, seed=1)
    want, want_lse = merged(a, lse_a, b, lse_b)
    into = (poisoned(5, 3, 16), poisoned(5, 3)) if given else ()
    out, lse = sglang.merge_state(a, lse_a, b, lse_b, *into)
    assert near(out, want) and near(lse, want_lse) and (not given or (out is into[0] and lse is into[1]))


# What goes to the engine's own function


X, STATE = operands(2), states()
SSU = {n: X[n] for n in ("x", "dt", "A", "B", "C", "D", "dt_bias")} | {"state": STATE, "out": torch.empty(2, 4, 8)}
G = gdn_operands(1, 2)
GDN = {n: G[n] for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
SLOTS, POOL = torch.tensor([1, 2], dtype=torch.int32), randn(4, HV, V, K)
VLLM_GDN = GDN | {"initial_state": POOL, "ssm_state_indices": SLOTS, "cu_seqlens": starts_of([1, 1])}
SGLANG_GDN = GDN | {"initial_state_source": POOL, "initial_state_indices": SLOTS, "cu_seqlens": starts_of([1, 1])}
SGLANG_GDN |= {"softplus_beta": 1.0, "softplus_threshold": 20.0}
WEIGHT, BIAS = taps(4)
CONV = {"x": randn(2, DIM), "conv_state": randn(4, DIM, 3), "weight": WEIGHT, "bias": BIAS}
PACKED = {"x": randn(DIM, 4), "weight": WEIGHT, "bias": BIAS, "conv_states": randn(4, DIM, 3), "query_start_loc": starts_of([2, 2])}
MERGE = {"prefix_output": randn(5, 3, 16), "suffix_output": randn(5, 3, 16), "prefix_lse": randn(3, 5), "suffix_lse": randn(3, 5)}
SIGMOID = "fused_sigmoid_gating_delta_rule_update"


@pytest.mark.refused
@pytest.mark.parametrize(
    ("engine", "name", "call", "words"),
    [
        ("vllm", "selective_state_update", SSU | {"out": None}, "out is None"),
        ("vllm", "selective_state_update", SSU | {"enable_stochastic_rounding": True}, "no state is written in float16 or bfloat16"),
        ("vllm", "selective_state_update", SSU | {"state": STATE[..., ::2]}, "d_state"),
        ("vllm", "causal_conv1d_update", CONV | {"x": CONV["x"].half()}, "conv_state is float32, x is float16"),
        ("vllm", "causal_conv1d_fn", PACKED | {"x": PACKED["x"].half()}, "conv_states is float32, x is float16"),
        ("vllm", "fused_recurrent_gated_delta_rule_packed_decode",
         {"mixed_qkv": randn(2, 99), "a": G["a"][0], "b": G["b"][0], "A_log": G["A_log"], "dt_bias": G["dt_bias"], "scale": 1.0,
          "initial_state": POOL, "out": torch.empty(2, 1, HV, V), "ssm_state_indices": SLOTS}, "mixed_qkv has 99 channels"),
        ("vllm", SIGMOID, VLLM_GDN | {"threshold": 10.0}, "beta 1.0 and threshold 10.0"),
        ("vllm", SIGMOID, VLLM_GDN | {"inplace_final_state": False}, "inplace_final_state=False"),
        ("vllm", SIGMOID, VLLM_GDN | {"ssm_state_indices": None}, "ssm_state_indices is None"),
        ("vllm", SIGMOID, VLLM_GDN | {"num_accepted_tokens": SLOTS}, "no column per token"),
        ("vllm", "merge_attn_states", MERGE | {"output": torch.empty(5, 3, 16), "output_scale": torch.ones(1)}, "output_scale"),
        ("sglang", "selective_state_update", SSU | {"enable_stochastic_rounding": True}, "goes with a float16 state"),
        ("sglang", "selective_state_update", SSU | {"intermediate_states_buffer": torch.zeros(2, 3, 4, 8, 16), "cache_steps": 2},
         "cache_steps is 2"),
        ("sglang", "causal_conv1d_update_triton", CONV | {"retrieve_parent_token": torch.zeros(2, 1)}, "a draft tree"),
        ("sglang", "causal_conv1d_update_triton", CONV | {"cache_seqlens": SLOTS}, "cache_seqlens"),
        ("sglang", "causal_conv1d_fn", PACKED | {"block_table": SLOTS}, "block_table"),
        ("sglang", SIGMOID, SGLANG_GDN | {"intermediate_states_buffer": POOL[None]}, "intermediate_states_buffer"),
        ("sglang", SIGMOID, SGLANG_GDN | {"retrieve_parent_token": SLOTS[None]}, "retrieve_parent_token"),
        ("sglang", SIGMOID, SGLANG_GDN | {"cache_ring": True}, "cache_ring"),
        ("sglang", SIGMOID, SGLANG_GDN | {"match_cutedsl_decode": True}, "match_cutedsl_decode"),
        ("sglang", SIGMOID, SGLANG_GDN | {"lower_bound": -5.0}, "of KDA's gate only"),
        ("sglang", SIGMOID, SGLANG_GDN | {"softplus_beta": 2.0}, "beta 2.0"),
        ("sglang", SIGMOID, SGLANG_GDN | {"initial_state_source": None}, "initial_state_source is None"),
    ],
)  # fmt: skip
def test_the_engine_does_what_ssmgen_refuses(request, caplog, engine, name, call, words):
    tensors = [t for t in call.values() if isinstance(t, Tensor) and t is not call.get("out") and t is not call.get("output")]
    before = [t.clone() for t in tensors]
    function: Callable = getattr(request.getfixturevalue(engine), name)
    assert function(**call) == function.__wrapped__(**call), "what the stand-in returns"
    assert words in caplog.text and all(map(torch.equal, tensors, before))
