"""Steps of vLLM and SGLang, in float64: Kimi delta attention, drafts of delta rules, gated norms, and other calls of their layers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from engine_calls import (  # noqa: F401
    HV,
    K,
    V,
    delta_token,
    gdn_operands,
    near,
    no_call_goes_to_the_engine,
    pages,
    poisoned,
    sglang_functions,
    vllm_functions,
)
from selection import costly
from test_engine_forms import same, starts_of, stored
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from torch_conv import DIM, F32, close, conv, randn, taps

BF16 = torch.bfloat16
TABLE = torch.arange(1, 16, dtype=torch.int32).view(5, 3)
TABLE[3, 1] = 0  # padding
LENGTHS, ACCEPTED = [3, 1, 0, 2], torch.tensor([2, 1, 1, 3, 9])


def drafted(before: Tensor, x: dict[str, Tensor], lower_bound: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(states, outputs [tokens, HV, V], which of them are padding) of LENGTHS drafts after ACCEPTED tokens, in slots of TABLE."""
    states, outputs = before.double(), torch.zeros(sum(LENGTHS), HV, V, dtype=torch.float64)
    padding = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    for n, (start, stop) in enumerate(pairwise(starts_of(LENGTHS).tolist())):
        slot = int(TABLE[n, ACCEPTED[n] - 1])
        padding[start:stop] = slot == 0
        S = before[slot].double()
        for t in range(start, stop):
            S, outputs[t] = delta_token(S, x, t, lower_bound=lower_bound)
            if slot and (to := int(TABLE[n, t - start])):
                states[to] = S
    return states, outputs.masked_fill(padding[:, None, None], 0), padding


def log_gates(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(log decays, betas) of raw gates and logits."""
    raw, A = x["a"] + x["dt_bias"].view(x["a"].shape[1:]), x["A_log"].exp()
    return -(A[:, None] if raw.dim() > 2 else A) * raw.exp().log1p(), x["b"].sigmoid()


@pytest.mark.parametrize("form", ["plain", "raw", "raw into out", "bounded", "glm", "glm of gates"])
def test_vllm_drafts_of_kda(vllm, form):
    """Reads the last accepted token's column and writes a column per token; buffers are longer than the batch."""
    x, state = gdn_operands(sum(LENGTHS), kda=True), pages(17, HV, V, K)
    before, bound = state.clone(), -5.0 if form in ("bounded", "glm") else None
    call = {n: x[n][None] for n in "qkv"} | {"initial_state": state, "cu_seqlens": starts_of(LENGTHS), "ssm_state_indices": TABLE}
    call |= {"num_accepted_tokens": ACCEPTED}
    out = poisoned(1, sum(LENGTHS), HV, V) if form in ("raw into out", "glm") else None
    if form == "plain" or form == "glm of gates":
        g, beta = log_gates(x)
        call |= {"g": g[None], "beta": beta[None], "use_qk_l2norm_in_kernel": True}
        function = vllm.fused_recurrent_kda_fwd if form == "plain" else vllm.fused_recurrent_kda_with_safe_gate
        got, pool = function(**call, scale=K**-0.5)
    elif form == "glm":
        gate = {"compute_gate": True, "sigmoid_beta": True, "a_log": x["A_log"].view(1, HV, 1), "g_bias": x["dt_bias"].view(HV, K)}
        got, pool = vllm.fused_recurrent_kda_with_safe_gate(**call, g=x["a"][None], beta=x["b"][None], out=out, lower_bound=bound, **gate)
    else:
        gate = {"raw_g": x["a"][None], "raw_beta": x["b"][None], "A_log": x["A_log"], "dt_bias": x["dt_bias"], "lower_bound": bound}
        got, pool = vllm.fused_recurrent_kda_with_fused_gate(**call, **gate, out=out)
    states, outputs, _ = drafted(before, x, bound)
    assert pool is state and (out is None or got is out) and near(got[0], outputs) and near(state, states)


def test_vllm_steps_of_kda(vllm):
    """The call of Bailing's layers: gates are ready, each sequence has one token and a slot; some keywords are ignored."""
    x, slots, state = gdn_operands(3, kda=True), torch.tensor([4, 0, 2], dtype=torch.int32), pages(6, HV, V, K)
    (g, beta), before = log_gates(x), state.clone()
    got, pool = vllm.fused_recurrent_kda(
        **{n: x[n][None] for n in "qkv"}, g=g[None], beta=beta[None], initial_state=state, use_qk_l2norm_in_kernel=True, safe_gate=True,
        lower_bound=None, cu_seqlens=starts_of([1, 1, 1]), ssm_state_indices=slots,
    )  # fmt: skip
    want = before.double()
    for n in (0, 2):
        want[slots[n]], y = delta_token(before[slots[n]].double(), x, n)
        assert near(got[0, n], y)
    assert pool is state and not got[0, 1].any() and near(state, want)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_packed_steps_of_kda(request, engine, bound):
    """mixed_qkv is a part of wider rows. For vLLM, slot 0 is padding too, and out may be missing."""
    x, slots, state = gdn_operands(4, kda=True), torch.tensor([5, 0, -1, 2], dtype=torch.int32), pages(7, HV, V, K)
    mixed = torch.cat([*(x[n].flatten(1) for n in "qkv"), randn(4, 3)], 1)[:, :-3]
    before, function = state.clone(), request.getfixturevalue(engine).fused_recurrent_kda_packed_decode
    gate = {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "lower_bound": bound, "initial_state": state}
    if engine == "vllm":
        got, pool = function(mixed, raw_g=x["a"][None], raw_beta=x["b"][None], state_indices=slots, **gate)
        got = got.transpose(0, 1)
    else:
        out = poisoned(4, 1, HV, V)
        more = {"scale": K**-0.5, "out": out, "ssm_state_indices": slots, "use_qk_l2norm_in_kernel": True}
        got, pool = function(mixed, a=x["a"].flatten(1), b=x["b"], **more, **gate)
        assert got is out
    want = before.double()
    for n, slot in enumerate(slots.tolist()):
        if slot < (1 if engine == "vllm" else 0):
            assert not got[n].any()
            continue
        want[slot], y = delta_token(before[slot].double(), x, n, lower_bound=bound)
        assert near(got[n, 0], y)
    assert pool is state and near(state, want)


def gated(x: Tensor, z: Tensor, weight: Tensor, eps: float, act=silu, first: bool = True, size: int | None = None) -> Tensor:
    """The gated norm in float64; first: the norm comes before the gate."""
    x, z, weight = x.double(), act(z.double()), weight.double()
    x = x if first else x * z
    groups = x.unflatten(-1, (-1, size or x.shape[-1]))
    return rms_norm(groups, groups.shape[-1:], eps=eps).flatten(-2) * weight * (z if first else 1)


def draft_call(x: dict[str, Tensor], state: Tensor, **more) -> dict:
    """Arguments of fused_gdn_decode_post_conv_mtp. Rows are parts of wider ones."""
    mixed = torch.cat([*(x[n].flatten(1) for n in "qkv"), randn(sum(LENGTHS), 8)], 1)[:, :-8]
    call = {"mixed_qkv": mixed, "a": x["a"], "b": x["b"], "A_log": x["A_log"], "dt_bias": x["dt_bias"], "state": state}
    call |= {"state_indices": TABLE[:4], "cu_seqlens": starts_of(LENGTHS), "num_accepted_tokens": ACCEPTED[:4]}
    heads, size = x["v"].shape[1:]
    wide = randn(sum(LENGTHS), heads * size + 8, seed=3)[:, :-8].unflatten(1, (heads, size))
    return call | {"output_gate": wide, "norm_weight": randn(size, seed=4), "scale": x["q"].shape[-1] ** -0.5} | more


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("given", [True, False])
def test_vllm_drafts_with_their_norm(vllm, activation, given):
    x, state = gdn_operands(sum(LENGTHS)), pages(17, HV, V, K)
    before, out = state.clone(), poisoned(sum(LENGTHS), HV, V) if given else None
    call = draft_call(x, state, out=out, norm_eps=1e-4, output_gate_activation=activation)
    got = vllm.fused_gdn_decode_post_conv_mtp(**call)
    states, outputs, padding = drafted(before, x)
    want = gated(outputs, call["output_gate"], call["norm_weight"], 1e-4, silu if activation == "silu" else torch.sigmoid)
    assert (out is None or got is out) and not got[padding].any() and near(state, states)
    # A norm divides by its operand's size: rounding errors of the operand grow by the same factor.
    assert (got.double() - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("ahead", [0, 2])
def test_vllm_drafts_of_lightning_attention(vllm, ahead):
    """Behind tokens and sequences of others; a count of 0 is like 1, and one beyond the columns like all of them."""
    table = torch.where(TABLE[:4] == 0, -1, TABLE[:4])
    table[2] = -1
    lengths, accepted = [3, 1, 2, 2], torch.tensor([2, 0, 1, 9])
    q, k, v = (randn(ahead + sum(lengths) + 1, HV, size, seed=s) for s, size in enumerate((K, K, V)))
    slopes, pool = randn(HV, seed=5).abs(), randn(17, HV, K, V, seed=6)
    before = pool.clone()
    slots = torch.cat([torch.full((ahead, 3), 16), table]).int()
    got = vllm.bailing_linear_attention_decode_spec(
        q, k, v, pool, slopes.view(1, HV, 1), slots, starts_of(lengths) + ahead, accepted, ahead, ahead + sum(lengths), ahead, None, 32
    )
    want, outputs = before.double(), torch.zeros(sum(lengths), HV, V, dtype=torch.float64)
    for n, (start, stop) in enumerate(pairwise(starts_of(lengths).tolist())):
        slot = int(table[n, min(max(int(accepted[n]), 1), 3) - 1])
        if slot < 0:
            continue
        S = before[slot].double()
        for t in range(start, stop):
            S = S * (-slopes.double()).exp()[:, None, None] + k[ahead + t].double()[..., None] * v[ahead + t].double()[:, None]
            outputs[t] = (S * q[ahead + t].double()[..., None]).sum(1)
            if (to := int(table[n, t - start])) >= 0:
                want[to] = S
    assert near(got, outputs.flatten(1)) and near(pool, want)


@pytest.mark.refused
def test_what_the_norm_refuses_leaves_the_states_of_drafts(vllm):
    """The norm comes after the delta rule. The engine's own function must not find the rule's step already done."""
    x, state = gdn_operands(sum(LENGTHS)), pages(17, HV, V, K)
    before = state.clone()
    call = draft_call(x, state, output_gate_activation="tanh")
    assert vllm.fused_gdn_decode_post_conv_mtp(**call) == vllm.fused_gdn_decode_post_conv_mtp.__wrapped__(**call)
    assert same(state, before)


@costly(6)
@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize("first", [True, False], ids=["norm first", "gate first"])
@pytest.mark.parametrize("form", ["vllm", "vllm in place", "sglang", "mixer"])
def test_norms_of_rows(request, form, first, group):
    """Norms also run by groups of channels. Gates are parts of wider rows."""
    engine = request.getfixturevalue("sglang" if "sglang" in form else "vllm")
    x, weight, how = randn(12, 24), randn(24, seed=1), {"eps": 1e-4, "group_size": group, "norm_before_gate": first}
    wide = randn(12, 31, seed=2)[:, 4:28]
    want = gated(x, wide, weight, 1e-4, first=first, size=group)
    if form == "mixer":
        got = engine.mixer2_rms_norm_gated(x, weight, None, z=wide, **how)
    elif "sglang" in form:
        got = engine.mixer2_rms_norm_gated(x=x, weight=weight, bias=None, z=wide, is_rms_norm=True, **how)
    else:
        into = {"out": x} if "place" in form else {}
        got, mean, rstd = engine.layer_norm_fwd(x, weight, None, z=wide, is_rms_norm=True, **how, **into)
        assert mean is None and rstd is None and (got is x) == bool(into)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_sglang_norms_of_heads_by_gates_of_tokens(sglang, activation):
    """x is [tokens * heads, size], and its gate [tokens, heads, size], part of a wider row."""
    x, weight, wide = randn(12, 24), randn(24, seed=1), randn(3, 4 * 24 + 6, seed=2)[:, : 4 * 24].unflatten(1, (4, 24))
    got = sglang.mixer2_rms_norm_gated(x=x, weight=weight, bias=None, z=wide, eps=1e-4, is_rms_norm=True, activation=activation)
    want = gated(x, wide.reshape(12, 24), weight, 1e-4, silu if activation == "swish" else torch.sigmoid)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norms_of_heads(request, engine, activation, dtype):
    """The gate has the same elements in other axes, and a distance between rows."""
    x, g = randn(1, 5, 3, 16).to(dtype), randn(5, 3 * 16 + 8, seed=1).to(dtype)[:, :48].unflatten(1, (3, 16))
    weight = randn(16, seed=2)
    want, wide = gated(x, g[None], weight, 1e-5, silu if activation == "swish" else torch.sigmoid), torch.cat([x, x], -1)[..., :16]
    other = request.getfixturevalue(engine).rms_norm_gated(wide, g, weight, None, activation, eps=1e-5)
    assert torch.equal(wide, x), "only what is dense is overwritten"
    got = request.getfixturevalue(engine).rms_norm_gated(x, g, weight, None, activation, eps=1e-5)
    assert got is x and torch.equal(got, other)
    torch.testing.assert_close(got.double(), want, rtol=2**-8 if dtype == BF16 else 1e-5, atol=1e-6)
    assert got.dtype == dtype and got.shape == x.shape


def test_what_torch_compile_traces_stays_the_engine_s(vllm, sglang):
    """Inside one graph ssmgen could not hand a refused call back to the engine."""
    for function in (vllm.rms_norm_gated, sglang.rms_norm_gated):
        own = torch.compile(lambda x, f=function: f(x, x, None, None), fullgraph=True, backend="eager")
        assert own(randn(4, 8)) == function.__wrapped__(*[None] * 4)


def test_sglang_convolution_of_prompts_in_triton(sglang):
    """The lengths, a list of work and unknown keywords add no information. Only the first entries of a longer state are the history."""
    weight, bias = taps(4)
    lengths, slots, started = [5, 1, 4], torch.tensor([3, -1, 4], dtype=torch.int32), torch.tensor([True, True, False])
    x, (pool, before) = randn(sum(lengths), DIM).t(), stored(9, 5)
    out = sglang.causal_conv1d_fn_triton(
        x, weight, bias, pool, starts_of(lengths), lengths, cache_indices=slots, has_initial_state=started, activation=True,
        block_table=torch.tensor([[0, 0], [1, 0], [2, 0]], dtype=torch.int32), other=1,
    )  # fmt: skip
    want = before.clone()
    for got, piece, slot, go_on in zip(out.split(lengths, 1), x.split(lengths, 1), slots.tolist(), started.tolist(), strict=True):
        if slot < 0:
            assert not got.any()
            continue
        history = before[slot, :, :3] if go_on else torch.zeros(DIM, 3)
        assert close(got, conv(history, piece, weight, bias, "silu"))
        want[slot, :, :3] = torch.cat([history, piece], 1)[:, -3:]
    assert same(pool, want)


@pytest.mark.parametrize("given", [False, True])
def test_sglang_merges_by_its_kernel_package(sglang, given):
    """LSEs of another dtype come to the same as ones of f32."""
    a, b, lse_a, lse_b = randn(5, 3, 16), randn(5, 3, 16, seed=1), randn(5, 3).half(), randn(5, 3, seed=1)
    into = (poisoned(5, 3, 16), poisoned(5, 3)) if given else ()
    out, lse = sglang.merge_state_v2(a, lse_a, b, lse_b, *into)
    assert not given or (out is into[0] and lse is into[1])
    want = torch.logaddexp(lse_a.double(), lse_b.double())
    weighted = sum(v.double() * (s.double() - want).exp()[..., None] for v, s in ((a, lse_a), (b, lse_b)))
    assert near(out, weighted) and near(lse, want)
