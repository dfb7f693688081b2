"""Calls of mamba2_layer, gdn_layer and kda_layer: their errors and their problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_calls import differing, make
from layer_cases import BF16, F32, GDN, I32, I64, KDA, MAMBA, named, vary

import ssmgen
from ssmgen.engine.recurrences.attention.problem import Beta, Gate, Layout, Tokens, Update
from ssmgen.errors import ArgumentError
from ssmgen.families.causal_conv1d_update.spec import Saved, StateLayout
from ssmgen.spec.kernel import Index, Loads, PoolMode

T3 = replace(MAMBA, id="mamba-t3", tokens=3)
ACCEPTED = replace(MAMBA, id="mamba-accepted", tokens=3, accepted=I32)
VERIFY = replace(MAMBA, id="mamba-verify", tokens=3, update=False, kept=BF16, saved="runs", rows=I32)
GDN_T3, KDA_T3 = (replace(base, id=f"{base.id}-t3", tokens=3) for base in (GDN, KDA))
GDN_ACCEPTED = replace(GDN_T3, accepted=I32)


def problems(case: Any, **changes: Any) -> list[str]:
    """The words of the error of a changed call, which leaves all tensors as they were."""
    call = make(case)
    with pytest.raises(ArgumentError) as e:
        call.run(**changes)
    assert str(e.value).startswith(f"{call.function.__name__} cannot run") and not differing(call, make(case))
    return e.value.problems


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


IN_ALL: list[tuple[dict[str, Any], str]] = [
    ({"z": torch.zeros(5, 128)[:, ::2]}, "z has strides [128, 2]; expected a last stride of 1"),
    ({"z": None}, "norm_weight is given without z"),
    ({"conv_state": torch.zeros(19, 190, 3, dtype=BF16)}, "conv_state is [19, 190, 3]; expected [slots, channels, width - 1 or width]"),
    ({"arrivals": torch.zeros(19, 2, dtype=I64)}, "arrivals is int64; expected int32"),
    ({"arrivals": torch.zeros(19, 9, dtype=I32)}, "arrivals is [19, 9]; expected [slots, groups] = [19,"),
    ({"state": torch.zeros(19, 4, 32, 16).mT}, "state has strides [2048, 512, 1, 16]; expected dense last three axes, [512, 32, 1]"),
    ({"out": torch.zeros(1, 64).expand(5, 64)}, "two of its elements share memory"),
    ({"out": torch.zeros(5, 64, device="meta")}, "out is on meta, state is on cpu"),
    ({"pdl": 1.5}, "pdl is 1.5; expected True, False or None"),
]
ONE_TOKEN: list[tuple[Any, dict[str, Any], str]] = [
    (MAMBA, {"xBC": None}, "xBC is a NoneType; expected a tensor"),
    (MAMBA, {"state": torch.zeros(19, 4, 16)}, "state is [19, 4, 16] and xBC [5, 192]; expected [slots, heads, headdim, d_state]"),
    (MAMBA, {"xBC": torch.zeros(5, 191, dtype=BF16)}, "xBC is [5, 191]; expected 64 channels of x"),
    (MAMBA, {"xBC": torch.zeros(5, 192)}, "conv_state is torch.bfloat16; expected torch.float32, the dtype of xBC"),
    (MAMBA, {"dt": torch.zeros(5, 3)}, "dt is [5, 3]; expected [batch, heads] = [5, 4]"),
    (MAMBA, {"z": torch.zeros(5, 16)}, "z is [5, 16]; expected [batch, heads * headdim] = [5, 64]"),
    (MAMBA, {"norm_weight": torch.zeros(16)}, "norm_weight is [16]; expected [heads * headdim] = [64] or [norm_group_size] = [64]"),
    (MAMBA, {"norm_group_size": 24}, "64 channels are not a multiple of norm_group_size 24; expected whole groups"),
    (MAMBA, {"norm_group_size": 16.0}, "norm_group_size is 16.0; expected a positive integer or None"),
    (MAMBA, {"norm_eps": "1e-5"}, "norm_eps is '1e-5'; expected a number of 0 or more"),
    (MAMBA, {"A_is_log": "yes"}, "A_is_log is 'yes'; expected True or False"),
    (MAMBA, {"dt_limit": (1.0, 0.0)}, "dt_limit is (1.0, 0.0); expected a tuple (low, high)"),
    (MAMBA, {"A": torch.zeros(4, 16)}, "A is [4, 16]; expected [heads] = [4]"),
    (MAMBA, {"D": torch.zeros(16)}, "D is [16]; expected [heads] = [4] or [heads, headdim] = [4, 16]"),
    (MAMBA, {"arrivals": torch.zeros(19, 4, dtype=I32)[:, ::2]}, "; expected a last stride of 1"),
    (MAMBA, {"xBC": torch.zeros(5, 192, requires_grad=True)}, "xBC requires grad"),
    (GDN, {"mixed_qkv": None}, "mixed_qkv is a NoneType; expected a tensor"),
    (GDN, {"state": torch.zeros(19, 4, 16)}, "state is [19, 4, 16] and mixed_qkv [5, 192]; expected [slots, heads, V, K] and [batch"),
    (GDN, {"mixed_qkv": torch.zeros(5, 191, dtype=BF16)}, "mixed_qkv is [5, 191]; expected"),
    (GDN, {"mixed_qkv": torch.zeros(5, 256, dtype=BF16)}, "of q and of k for each key head"),
    (GDN, {"mixed_qkv": torch.zeros(5, 192)}, "conv_state is torch.bfloat16; expected torch.float32, the dtype of mixed_qkv"),
    (GDN, {"a": torch.zeros(5, 3)}, "a is [5, 3]; expected [batch, heads] = [5, 4]"),
    (GDN, {"b": torch.zeros(5, 4, dtype=torch.float64)}, "b is torch.float64; expected float32, float16 or bfloat16"),
    (GDN, {"z": torch.zeros(5, 16)}, "z is [5, 16]; expected [batch, heads * V] = [5, 64] or [batch, heads, V] = [5, 4, 16]"),
    (GDN, {"norm_weight": None}, "z is given without norm_weight"),
    (GDN, {"norm_weight": torch.zeros(64)}, "norm_weight is [64]; expected [V] = [16]"),
    (GDN, {"A_log": torch.zeros(1)}, "A_log is [1]; expected [heads] = [4]"),
    (GDN, {"conv_weight": torch.zeros(192)}, "conv_weight is [192]; expected [channels, width]"),
    (GDN, {"state_indices": torch.zeros(5)}, "state_indices is torch.float32; expected int32 or int64"),
    (
        GDN,
        {
            "state_indices": None,
            "state": torch.zeros(4, 4, 16, 32),
            "conv_state": torch.zeros(4, 192, 3, dtype=BF16),
            "arrivals": torch.zeros(4, 2, dtype=I32),
        },
        "state has 4 slots; expected 5, one per sequence of the batch",
    ),
    (GDN, {"state_layout": "kk"}, "state_layout is 'kk'; expected 'vk' or 'kv'"),
    (GDN, {"norm_eps": 0}, "norm_eps is 0; expected a positive number"),
    (GDN, {"norm_activation": "gelu"}, "norm_activation is 'gelu'; expected 'silu', 'swish' or 'sigmoid'"),
    (GDN, {"norm_before_gate": "no"}, "norm_before_gate is 'no'; expected True or False"),
    (GDN, {"scale": "1"}, "scale is '1'; expected a number"),
    (GDN, {"use_qk_l2norm": None}, "use_qk_l2norm is None; expected True or False"),
    (GDN, {"mixed_qkv": torch.zeros(5, 192, requires_grad=True)}, "mixed_qkv requires grad"),
    (KDA, {"g": torch.zeros(5, 4, 31)}, "g is [5, 4, 31]; expected [batch, heads * K] = [5, 128] or [batch, heads, K] = [5, 4, 32]"),
    (KDA, {"g": None}, "g is a NoneType; expected a tensor"),
    (KDA, {"beta": torch.zeros(5, 4, 32)}, "beta is [5, 4, 32]; expected [batch, heads] = [5, 4]"),
    (KDA, {"dt_bias": torch.zeros(4)}, "dt_bias is [4]; expected [heads * K] = [128] or [heads, K] = [4, 32]"),
    (KDA, {"A_log": None}, "A_log and lower_bound are None; expected one of them"),
    (KDA, {"A_log": torch.zeros(4, 32)}, "A_log is [4, 32]; expected [heads] = [4]"),
    (KDA, {"lower_bound": "-5"}, "lower_bound is '-5'; expected a number"),
    (KDA, {"lower_bound": float("nan")}, "lower_bound is nan; expected a number"),
    (KDA, {"mixed_qkv": torch.zeros(5, 321, dtype=BF16)}, "mixed_qkv is [5, 321]; expected"),
]
NONE = {"xBC": bf16(5, 0, 192), "dt": bf16(5, 0, 4), **dict.fromkeys(("z", "out"), bf16(5, 0, 64))}  # tokens
SEVERAL: list[tuple[Any, dict[str, Any], str]] = [
    (replace(T3, tokens=9), {}, "xBC is [5, 9, 192], 9 tokens per sequence; expected 1 … 8"),
    (T3, NONE, "xBC is [5, 0, 192], 0 tokens per sequence; expected 1 … 8"),
    (T3, {"xBC": bf16(5, 192)}, "out is [5, 3, 64]; expected [batch, heads * headdim] = [5, 64]"),
    (
        T3,
        {"xBC": bf16(5, 192), "intermediate_states": bf16(5, 3, 4, 16, 32)},
        "xBC is [5, 192] with intermediate_states; expected [batch, tokens",
    ),
    (T3, {"xBC": bf16(5, 192), "update_state": False}, "xBC is [5, 192] with update_state=False; expected [batch, tokens"),
    (T3, {"xBC": bf16(5, 2, 3, 192)}, "and xBC [5, 2, 3, 192]; expected"),
    (T3, {"dt": bf16(5, 4)}, "dt is [5, 4]; expected [batch, tokens, heads] = [5, 3, 4]"),
    (T3, {"z": bf16(5, 2, 64)}, "z is [5, 2, 64]; expected [batch, tokens, heads * headdim] = [5, 3, 64]"),
    (T3, {"out": bf16(5, 1, 64).expand(5, 3, 64)}, "out has strides [64, 0, 1], and two of its elements share memory"),
    (T3, {"update_state": "no"}, "update_state is 'no'; expected True or False"),
    (T3, {"xBC": torch.zeros(5, 3, 192)}, "conv_state is torch.bfloat16; expected"),
    (T3, {"intermediate_state_indices": torch.zeros(5, dtype=I32)}, "intermediate_state_indices is given without a buffer"),
    (
        VERIFY,
        {"intermediate_states": bf16(9, 2, 4, 16, 32)},
        "intermediate_states is [9, 2, 4, 16, 32]; expected [rows, tokens or more, heads, headdim",
    ),
    (VERIFY, {"intermediate_states": bf16(9, 3, 4, 32, 16).mT}, "intermediate_states has strides [6144, 2048, 512, 1, 16]"),
    (VERIFY, {"intermediate_states": bf16(9, 1, 4, 16, 32).expand(9, 3, 4, 16, 32)}, "two of its elements share memory"),
    (
        VERIFY,
        {"intermediate_conv_window": bf16(9, 3, 192, 4)},
        "intermediate_conv_window is [9, 3, 192, 4]; expected [rows, tokens or more, channels",
    ),
    (VERIFY, {"intermediate_conv_window": torch.zeros(9, 3, 192, 3)}, "intermediate_conv_window is torch.float32; expected"),
    (VERIFY, {"intermediate_state_indices": torch.zeros(4, dtype=I32)}, "intermediate_state_indices is [4]; expected [batch] = [5]"),
    (
        VERIFY,
        {"intermediate_state_indices": None, "intermediate_states": bf16(4, 3, 4, 16, 32)},
        "intermediate_states is [4, 3, 4, 16, 32]; expected [batch or more, tokens or more, heads",
    ),
    (VERIFY, {"intermediate_state_indices": torch.zeros(5)}, "intermediate_state_indices is torch.float32; expected int32 or int64"),
    (ACCEPTED, {"dst_state_indices": None}, "is missing; expected num_accepted_tokens"),
    (ACCEPTED, {"num_accepted_tokens": None, "state_indices": torch.zeros(5, dtype=I32)}, "is missing; expected num_accepted_tokens"),
    (ACCEPTED, {"state_indices": None}, "is missing; expected num_accepted_tokens"),
    (ACCEPTED, {"update_state": False}, "num_accepted_tokens and dst_state_indices are given with update_state=False"),
    (ACCEPTED, {"dst_state_indices": torch.zeros(5, 3, dtype=I64)}, "state_indices is torch.int32 and dst_state_indices is"),
    (ACCEPTED, {"dst_state_indices": torch.zeros(5, dtype=I32)}, "dst_state_indices is [5]; expected [batch, tokens] = [5, 3]"),
    (ACCEPTED, {"state_indices": torch.zeros(5, dtype=I32)}, "state_indices is [5]; expected [batch, columns], of which"),
    (ACCEPTED, {"state_indices": torch.zeros(5, 33, dtype=I32)}, "state_indices is [5, 33]; expected 1 … 32 columns"),
    (ACCEPTED, {"state_indices": torch.zeros(5, 0, dtype=I32)}, "state_indices is [5, 0]; expected 1 … 32 columns"),
    (ACCEPTED, {"num_accepted_tokens": torch.zeros(3, dtype=I32)}, "num_accepted_tokens is [3]; expected [batch] = [5]"),
    (
        replace(GDN, tokens=9),
        {},
        "mixed_qkv is [5, 9, 192], 9 tokens per sequence; expected 1 … 8",
    ),
    (replace(KDA, tokens=9), {}, "mixed_qkv is [5, 9, 320], 9 tokens per sequence; expected 1 … 8"),
    (
        GDN_T3,
        {"mixed_qkv": torch.zeros(5, 192, dtype=BF16), "update_state": False},
        "mixed_qkv is [5, 192] with update_state=False; expected [batch, tokens",
    ),
    (GDN_T3, {"update_state": 2}, "update_state is 2; expected True or False"),
    (GDN_T3, {"a": torch.zeros(5, 4)}, "a is [5, 4]; expected [batch, tokens, heads] = [5, 3, 4]"),
    (KDA_T3, {"g": torch.zeros(5, 3, 4)}, "g is [5, 3, 4]; expected [batch, tokens, heads * K] = [5, 3, 128] or [batch,"),
    (GDN_T3, {"z": torch.zeros(5, 64)}, "z is [5, 64]; expected [batch, tokens, heads * V] = [5, 3, 64] or [batch, tokens, heads, V]"),
    (GDN_T3, {"intermediate_states": torch.zeros(5, 2, 4, 16, 32)}, "intermediate_states is [5, 2, 4, 16, 32]; expected [batch or more"),
    (
        GDN_T3,
        {"intermediate_states": torch.zeros(5, 3, 4, 16, 32)},
        "intermediate_states is torch.float32; expected torch.bfloat16, the dtype of state",
    ),
    (
        GDN_T3,
        {"intermediate_conv_window": torch.zeros(5, 3, 192, 3)},
        "intermediate_conv_window is torch.float32; expected",
    ),
    (GDN_T3, {"intermediate_state_indices": torch.zeros(5, dtype=I32)}, "intermediate_state_indices is given without a buffer"),
    (GDN_T3, {"num_accepted_tokens": torch.ones(5, dtype=I32)}, "state_indices is [5]; expected [batch, columns], of which num_accepted"),
    (GDN_T3, {"dst_state_indices": torch.zeros(5, 3, dtype=I32)}, "is missing; expected num_accepted_tokens"),
    (GDN_ACCEPTED, {"dst_state_indices": torch.zeros(5, 3, dtype=I64)}, "state_indices is torch.int32 and dst_state_ind"),
    (GDN_ACCEPTED, {"update_state": False}, "num_accepted_tokens and dst_state_indices are given with update_state=False"),
]
WRONG = [(case, *wrong) for case in (MAMBA, GDN, KDA) for wrong in IN_ALL] + ONE_TOKEN + SEVERAL


@pytest.mark.parametrize(("case", "change", "words"), WRONG, ids=[f"{case.id}, {words[:40]}" for case, _, words in WRONG])
def test_what_is_wrong_in_words(case, change, words):
    found = problems(case, **change)
    assert any(words in problem for problem in found), found


ALL_WRONG = [
    (MAMBA, {"dt": torch.zeros(9), "A": torch.zeros(9), "conv_bias": torch.zeros(9), "D": torch.zeros(9), "pdl": "yes"}),
    (
        GDN,
        {
            "a": torch.zeros(9),
            "A_log": torch.zeros(9),
            "conv_bias": torch.zeros(9),
            "norm_eps": -1,
            "norm_activation": "relu",
            "pdl": "yes",
        },
    ),
]


@pytest.mark.parametrize(("case", "changes"), ALL_WRONG, ids=["mamba", "gdn"])
def test_all_that_is_wrong_at_once(case, changes):
    assert len(problems(case, **changes)) >= len(changes)


@named([GDN, GDN_T3])
def test_what_overlaps_in_memory(case):
    call = make(case)
    with pytest.raises(ArgumentError, match="out overlaps z in memory"):
        call.run(out=call.kwargs["z"])
    with pytest.raises(ArgumentError, match="state overlaps"):
        call.run(z=call.kwargs["state"].view(-1)[: call.kwargs["z"].numel()].view(call.kwargs["z"].shape))
    if case.tokens:
        kept = torch.zeros(1, 1, 4, 16, 32, dtype=BF16).expand(5, 3, 4, 16, 32)
        assert any("two of its elements share memory" in p for p in problems(case, intermediate_states=kept))


# What serves a call.

SUPPORTED = [
    *[MAMBA, *vary(MAMBA, f32={"state": F32, "x": F32}, gated={"norm": None}), T3, ACCEPTED, VERIFY],
    *[GDN, *vary(GDN, kv={"layout": "kv", "x": F32}, bare={"norm": None, "bias": False}), GDN_T3],
    *[KDA, *vary(KDA, bounded={"lower_bound": -5.0}, bare={"norm": None, "bias": False})],
    *[replace(KDA, id="kda-t8", tokens=8, accepted=I64, batch=8), replace(GDN, id="gdn-t1", tokens=1, update=False, kept=BF16)],
    replace(T3, id="mamba-t3-gated", norm=None),
]


@named(SUPPORTED)
def test_supported_and_explained(case):
    call = make(case)
    assert ssmgen.supported(call.function, **call.kwargs, arch="sm_90a") == (True, [])
    told, name = ssmgen.explain(call.function, **call.kwargs, arch="sm_90a"), call.function.__name__
    assert told.operator == ("mamba2_layer" if name == "mamba2_layer" else "delta_layer") and f"{told.operator}:" in str(told)
    if name == "mamba2_layer":
        assert told.chosen.spec.several == bool(case.tokens)
        return
    assert told.chosen.spec.function == name
    good, why = ssmgen.supported(call.function, **call.kwargs | {"norm_eps": None}, arch="sm_90a")
    assert not good and why == ["norm_eps is None; expected a positive number in the range of float32 or int64"]


def test_what_no_kernel_serves():
    """A window that is too short for its tokens; more shared memory than there is."""
    call = make(ACCEPTED)
    short = call.kwargs | {"conv_state": call.kwargs["conv_state"][..., :4].contiguous()}
    served, reasons = ssmgen.supported(ssmgen.mamba2_layer, **short, arch="sm_90a")
    assert not served and reasons == ["conv_state holds 4 inputs per channel; expected 5 or more with num_accepted_tokens"]
    served, reasons = ssmgen.supported(ssmgen.mamba2_layer, **make(replace(MAMBA, tokens=8, N=1024)).kwargs, arch="sm_90a")
    assert not served and "bytes of shared memory; expected at most 49152" in reasons[0]


def test_heads_that_no_kernel_serves_are_refused():
    call = make(replace(GDN, V=18))
    good, why = ssmgen.supported(ssmgen.gdn_layer, **call.kwargs, arch="sm_90a")
    assert not good and any("; expected multiples of" in reason for reason in why), why


def posed(case: Any, **changes: Any) -> Any:
    return make(replace(case, **changes)).built().problem()[0]


@named([MAMBA, GDN, KDA])
def test_problems_say_where_operands_lie(case):
    aligned, odd, gap = posed(case), posed(case, odd=True, window="any"), posed(case, slot_gap=1)
    assert {aligned.conv.loads, aligned.conv.taps, aligned.norm.loads, aligned.state_loads} == {Loads.VECTOR}
    assert {odd.conv.loads, odd.conv.taps, odd.norm.loads} == {Loads.ELEMENT} and odd.state_loads is Loads.VECTOR
    assert gap.state_loads is Loads.ELEMENT and posed(case, batch=1) == aligned


def test_problems_of_delta_layers():
    aligned = posed(KDA)
    assert aligned.operand_loads is Loads.VECTOR and aligned.gate is Gate.SOFTPLUS
    assert posed(KDA, odd=True).operand_loads is Loads.ELEMENT
    assert posed(KDA, lower_bound=-5.0).gate is Gate.BOUNDED and posed(KDA, lower_bound=-5.0, bare_gate=True).A_log is None
    assert posed(KDA, headed=True, flat=True, batch=1) == aligned and posed(GDN, headed=True) == posed(GDN)
    assert posed(GDN, layout="kv").layout is Layout.KV and posed(GDN, twice=True).beta_form is Beta.TWICE_SIGMOID


def test_problems_of_several_tokens():
    plain, kept, frozen = posed(GDN_T3), posed(GDN_T3, kept=BF16, saved="runs", rows=I32), posed(GDN_T3, update=False)
    assert (plain.tokens, plain.update, plain.conv.tokens, plain.intermediates) == (Tokens.MANY, Update.FINAL, 3, False)
    assert kept.intermediates and kept.intermediate_indices is kept.conv.rows is kept.rows_index is Index.I32
    assert frozen.update is Update.NONE and not frozen.conv_moves and not frozen.frozen
    accepted = posed(GDN_T3, accepted=I64, index=I64)
    assert (accepted.update, accepted.pool, accepted.accepted, accepted.conv_rolls) == (Update.EACH, PoolMode.SPLIT, Index.I64, True)
    assert posed(GDN_T3, kept=BF16, slot_gap=1).state_loads is Loads.ELEMENT and posed(KDA_T3, odd=True).operand_loads is Loads.ELEMENT


def test_problems_of_several_tokens_of_mamba2():
    assert not posed(T3, tokens=1).several, "one token's kernels"
    final, verify, accepted = posed(T3), posed(VERIFY), posed(ACCEPTED)
    assert [p.update for p in (final, verify, accepted)] == [Update.FINAL, Update.NONE, Update.EACH]
    assert (final.conv.tokens, final.conv.windows, final.pool, final.intermediates) == (3, Saved.NO, PoolMode.SINGLE, False)
    assert (verify.conv.windows, verify.conv.rows, verify.intermediate_indices) == (Saved.RUNS, Index.I32, Index.I32)
    assert (accepted.accepted, accepted.pool, accepted.conv.len, accepted.conv.layout) == (Index.I32, PoolMode.SPLIT, 5, StateLayout.RUNS)
    assert posed(ACCEPTED, extra=1).conv.layout is StateLayout.ANY, ", since a kernel rewrites the whole run"
    assert posed(VERIFY, kept=None).intermediate_indices is Index.NONE and posed(VERIFY, saved="").conv.rows is Index.NONE
    assert posed(VERIFY, saved="any").conv.windows is Saved.ANY and posed(VERIFY, slot_gap=1).state_loads is Loads.ELEMENT
