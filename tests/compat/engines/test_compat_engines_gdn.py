"""vLLM's and SGLang's gated delta rules and merges as these call them, through their replaced names, in float64."""

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
from test_engine_forms import starts_of
from torch import Tensor
from torch_conv import F32, randn

BF16 = torch.bfloat16


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


def test_vllm_warms_with_a_page_for_a_state(vllm):
    """[slots, page] instead of [slots, HV, V, K], and a slot of padding; the rest of a page stays unchanged."""
    x, state = gdn_operands(1, 1), randn(2, HV * V * K + 7)
    call = {n: x[n] for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
    for slot in (0, 1):
        before = state.clone()
        out, pool = vllm.fused_sigmoid_gating_delta_rule_update(
            **call, initial_state=state, cu_seqlens=starts_of([1]), ssm_state_indices=torch.tensor([[slot]]), use_qk_l2norm_in_kernel=True
        )
        assert pool is state
        if slot:
            S, y = delta_token(before[1, : HV * V * K].view(HV, V, K).double(), x, 0, 0)
            assert near(out[0, 0], y) and near(state[1, : HV * V * K].view(HV, V, K), S)
            state[1, : HV * V * K] = before[1, : HV * V * K]
        else:
            assert not out.any()
        assert torch.equal(state, before)


@pytest.mark.parametrize("form", ["steps", "batch", "table"])
def test_vllm_recurrent_of_gates(vllm, form):
    """OLMo's calls: g and beta are ready, steps are packed. Also a batch of tokens without cu_seqlens, and the first column of a table."""
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


def test_sglang_rows_beside_sequences(sglang):
    """[B, T] with cu_seqlens: the rows' tokens are concatenated, and sequences end anywhere."""
    x, slots = gdn_operands(6), torch.tensor([3, 1], dtype=torch.int32)
    how = {"use_qk_l2norm_in_kernel": True, "softplus_beta": 1.0, "softplus_threshold": 20.0, "cu_seqlens": starts_of([4, 2])}
    how |= {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "initial_state_indices": slots}
    outs, states = [], []
    for lead in (1, 6), (2, 3):
        states.append(torch.ones(5, HV, V, K))
        tokens = {n: x[n].unflatten(0, lead) for n in "qkvab"}
        outs.append(sglang.fused_sigmoid_gating_delta_rule_update(**tokens, initial_state_source=states[-1], **how))
    assert outs[1].shape == (2, 3, HV, V) and torch.equal(outs[0].flatten(0, 1), outs[1].flatten(0, 1))
    assert torch.equal(*states) and not torch.equal(states[0][1], states[0][0])


# Merging


def merged(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial outputs merged by their LSEs [tokens, heads], in float64."""
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
