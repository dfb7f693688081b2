"""Prompts of transformers' models with ssmgen's convolution and scan: the logits and the cache that their own functions give."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import (
    DELTA_RULE,
    KDA,
    LAYERS,
    NORMS,
    PROMPTED,
    Prompt,
    assert_close,
    assert_same_generation,
    convolutions,
    fused_calls,
    fused_prompt_calls,
    generate,
    mixers,
    modeling,
    norm_of_error,
    of_prompts,
    prompt_calls,
    prompted,
    scans_of_a_layer,
)
from hf_cases import nothing_stays_patched as nothing_stays_patched
from selection import kept
from torch._subclasses.fake_tensor import FakeTensorMode

import ssmgen
from ssmgen.compat import hf
from ssmgen.compat.hf import functions
from ssmgen.errors import ArgumentError
from ssmgen.spec.kernel import Pdl

every_kind = pytest.mark.parametrize("name", PROMPTED)
THOROUGH = ("jamba", "bamba", "qwen3_next")  # one with a Mamba, one with a Mamba-2, one with a delta rule
MAMBA2 = [name for name in PROMPTED if "mamba2_chunk_scan" in of_prompts(name)]


def of_kinds(argument, always, others):
    """Every kind with the values for all; two kinds also with the others; the rest belongs to the matrix."""
    return pytest.mark.parametrize(
        ("name", argument),
        [
            pytest.param(name, value, id=f"{name}-{value}", marks=() if value in always or name in THOROUGH else pytest.mark.matrix)
            for name in PROMPTED
            for value in (*always, *others)
        ],
    )


def assert_same(got: Prompt, want: Prompt) -> None:
    assert_close(got.logits, want.logits)
    assert len(got.states) == len(want.states)
    for a, b in zip(got.states, want.states, strict=True):
        assert_close(a, b)


@of_kinds("length", always=(1, 65), others=(3,))
def test_a_prompt_and_one_behind_it(name, length):
    """Runs with a new cache and with a cache that has tokens: convolution windows, states and logits equal transformers' own."""
    model = prompted(name)
    want = Prompt.run(model, length)
    after = want.go_on(model, 7)
    with hf.patch(model) as patch:
        got = Prompt.run(model, length)
        counted = patch.calls()
        again = got.go_on(model, 7)
    assert_same(got, want)
    assert_same(again, after)
    assert len(got.states) == 2 * convolutions(model)
    assert counted == prompt_calls(name, model)
    assert patch.calls() == {label: hf.Calls(2 * calls.ssmgen, 0) for label, calls in counted.items()}


@every_kind
def test_a_prompt_without_a_cache(name):
    model = prompted(name)
    want = Prompt.run(model, 9, use_cache=False)
    with hf.patch(model) as patch:
        got = Prompt.run(model, 9, use_cache=False)
    assert_same(got, want)
    assert not got.states and patch.calls() == prompt_calls(name, model)


@pytest.mark.parametrize(
    "name", [*PROMPTED, *kept((f"fused {name}" for name in PROMPTED if name in NORMS), lambda fused: fused.endswith(THOROUGH))]
)
def test_padding_on_the_left(name):
    """A row's states equal the states of the row alone: padding is masked before and after the convolution."""
    *fuse, name = name.split()
    model = prompted(name)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    want = Prompt.run(model, 9, attention_mask=mask)
    with hf.patch(model, fuse=bool(fuse)) as patch:
        got = Prompt.run(model, 9, attention_mask=mask)
        alone = Prompt.run(model, 9, rows=slice(1, 2), tokens=slice(4, 9))
    assert_same(got, want)
    counted = [fused_prompt_calls(name, model, m) if fuse else prompt_calls(name, model) for m in (mask, mask[1:, 4:])]
    assert patch.calls() == {label: hf.Calls(sum(calls[label].ssmgen for calls in counted), 0) for label in counted[0]}
    assert got.recurrent
    for state, by_itself in zip(got.recurrent, alone.recurrent, strict=True):
        assert_close(state[1:], by_itself)


@pytest.mark.parametrize(
    "name", [*PROMPTED, *kept((f"fused {name}" for name in PROMPTED if name in LAYERS), lambda fused: fused.endswith(THOROUGH))]
)
def test_greedy_tokens_behind_padding(name):
    *fuse, name = name.split()
    model = prompted(name)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    want = generate(model, 4, attention_mask=mask)
    with hf.patch(model, fuse=bool(fuse)) as patch:
        got = generate(model, 4, attention_mask=mask)
    assert_same_generation(got, want)
    assert patch.calls() == fused_calls(name, model, 3) if fuse else patch.calls().items() >= prompt_calls(name, model).items()


@of_kinds("dtype", always=(torch.bfloat16,), others=(torch.float16,))
def test_16_bit_prompts_are_no_farther_from_the_same_weights_in_f32(name, dtype):
    """The error is at most twice the model's own: that is left to chance in so few numbers."""
    model = prompted(name).to(dtype)
    exact, theirs = Prompt.run(copy.deepcopy(model).float(), 65), Prompt.run(model, 65)
    with hf.patch(model) as patch:
        ours = Prompt.run(model, 65)
    assert patch.calls() == prompt_calls(name, model)
    assert norm_of_error(ours, exact) <= 2 * norm_of_error(theirs, exact)
    assert [state.dtype for state in ours.states] == [state.dtype for state in theirs.states]


@pytest.mark.parametrize("name", [*MAMBA2, "qwen3_next", "qwen3_5", "kimi_linear"])
def test_packed_sequences_are_kept_apart(name):
    """A layer's result for each equals its result alone. Transformers' own functions refuse such calls."""
    layer = mixers(prompted(name))[0]
    torch.manual_seed(0)
    tokens = torch.randn(1, 9, 32)
    where = {"seq_idx": torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32)}
    *_, scan = of_prompts(name)
    if scan in (DELTA_RULE, KDA):  # it takes the starts, and the convolution before it takes seq_idx
        where["cu_seq_lens_q"] = torch.tensor([0, 4, 9], dtype=torch.int32)
    with hf.patch(name) as patch, torch.no_grad():
        packed = layer(tokens, **where)
        alone = [layer(part) for part in tokens.split([4, 5], dim=1)]
    assert_close(packed, torch.cat(alone, dim=1))
    assert patch.calls()[f"{name}.{scan}"] == hf.Calls(3, 0)


@every_kind
def test_a_card_launches_the_scan_while_the_convolution_ends(name):
    model = prompted(name).bfloat16()
    with hf.patch(model), functions.recording() as calls:
        Prompt.run(model, 65)
    convolution, scan = of_prompts(name).values()
    assert [call.function.__name__ for call in calls] == [convolution, *[scan] * scans_of_a_layer(name)] * convolutions(model)
    with torch.no_grad():
        for call in calls:
            chosen = ssmgen.explain(call.function, *call.args, arch="sm_90a", **call.kwargs).chosen
            assert chosen is not None
            assert all(kernel.pdl is not Pdl.OFF for kernel in getattr(chosen.spec, "kernels", (chosen.spec,)))


# The function itself.


def operands(dtype=torch.float32, headdim=16, **more):
    torch.manual_seed(0)
    x, B, C = torch.randn(2, 5, 4, headdim), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16)
    dt, A = torch.randn(2, 5, 4), -torch.rand(4)
    given = {"hidden_states": x, "dt": dt, "A": A, "B": B, "C": C, "D": torch.randn(4), "dt_bias": torch.randn(4), **more}
    return {name: t.to(dtype) if isinstance(t, torch.Tensor) else t for name, t in given.items()} | {"chunk_size": 4, "dt_softplus": True}


def rows_of_channels(t):
    """The same numbers, laid out channel by channel, as after a convolution with a cache's window."""
    return t.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(t.shape)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.5, 1.0), (0.5, float("inf"))], ids=str)
@pytest.mark.parametrize("softplus", [True, False])
def test_limits_of_the_step_and_rows_in_any_layout(limit, softplus):
    given = operands(initial_states=torch.randn(2, 4, 16, 16)) | {"dt_softplus": softplus, "dt_limit": limit, "return_final_states": True}
    want = modeling("mamba2").mamba2_chunk_scan(**given)
    given |= {name: rows_of_channels(given[name]) for name in ("hidden_states", "B", "C")}
    assert given["hidden_states"].stride(-1) != 1
    got = functions.mamba2_chunk_scan(**given)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_packed_sequences_by_their_starts_are_refused():
    with pytest.raises(ArgumentError, match="cu_seqlens is given; expected seq_idx for packed sequences"):
        functions.mamba2_chunk_scan(**operands(), cu_seqlens=torch.tensor([0, 5]))


# The delta rule's.


def of_delta_rule(dtype=torch.float32, heads=4):
    """[2, 9] tokens of 4 heads, key heads among them as 5.17 calls it, or fewer."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, n, size).to(dtype) for n, size in ((heads, 16), (heads, 16), (4, 32)))
    g, beta = -torch.rand(2, 9, 4), torch.rand(2, 9, 4).to(dtype)
    return {"query": q, "key": k, "value": v, "g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}


def transformers_own(**given):
    """The result of transformers' own function, in any version: older ones need equal numbers of key and value heads."""
    repeated = {name: given[name].repeat_interleave(4 // given[name].shape[2], dim=2) for name in ("query", "key")}
    return modeling("qwen3_next").torch_chunk_gated_delta_rule(**given | repeated)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "channels"])
def test_a_delta_rules_first_state_is_made_in_f32(heads, rows):
    given = of_delta_rule(torch.bfloat16, heads) | {"output_final_state": True}
    in_f32 = {name: t.float() if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    want, state = transformers_own(**in_f32)  # given bf16, 5.15 also rounds q and k after their norms
    if not rows:
        given |= {name: rows_of_channels(given[name]) for name in ("query", "key", "value")}
        assert given["query"].stride(-1) != 1
    got, made = functions.torch_chunk_gated_delta_rule(**given)
    assert (got - want).abs().max() <= 2**-8 * want.abs().max(), "a rounding of bf16"
    assert_close(made, state)


@pytest.mark.parametrize("keep", [True, False])
def test_a_delta_rules_state_is_updated_in_place_and_returned_itself(keep):
    given, state = of_delta_rule() | {"output_final_state": True}, torch.randn(2, 4, 16, 32)
    before = state.clone()
    want, new = transformers_own(**given, initial_state=before)
    got, returned = functions.torch_chunk_gated_delta_rule(**given | {"output_final_state": keep}, initial_state=state, use_cache=True)
    assert returned is (state if keep else None)
    assert_close(got, want)
    assert_close(state, new if keep else before)


def test_packed_sequences_of_a_delta_rule_have_states_of_their_own():
    given = {name: t[:1] if isinstance(t, torch.Tensor) else t for name, t in of_delta_rule().items()} | {"output_final_state": True}
    got, states = functions.torch_chunk_gated_delta_rule(**given, cu_seqlens=torch.tensor([0, 4, 9]))
    for i, part in enumerate((slice(0, 4), slice(4, 9))):
        alone = {name: t[:, part] if isinstance(t, torch.Tensor) else t for name, t in given.items()}
        want, state = functions.torch_chunk_gated_delta_rule(**alone)
        assert torch.equal(got[:, part], want) and torch.equal(states[i : i + 1], state)


def test_packed_sequences_of_a_delta_rule_without_their_starts_are_refused():
    with pytest.raises(ArgumentError, match="seq_idx is given; expected cu_seqlens for packed sequences"):
        functions.torch_chunk_gated_delta_rule(**of_delta_rule(), seq_idx=torch.zeros(2, 9, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("headdim", [16, 24])
def test_a_trace_for_a_card_goes_to_the_original_where_there_is_no_kernel(dtype, headdim):
    """Code that is compiled cannot find that out when it runs."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, B = (torch.empty(2, 5, 4, n, device="cuda", dtype=dtype) for n in (headdim, 16))
    args = (x, x, x, B, B, 4)
    refused = bool(functions.scan_faults(headdim, 16, dtype))
    assert refused == (headdim == 24)
    assert functions._ends_a_trace(functions.mamba2_chunk_scan, args, {}) == refused
    assert not functions._ends_a_trace(functions.mamba2_chunk_scan, (torch.empty(1, 1, 1, headdim), *args[1:]), {})


@pytest.mark.parametrize(
    ("dtype", "K", "V", "refused"),
    [(torch.bfloat16, 16, 32, False), (torch.bfloat16, 16, 24, True), (torch.float16, 24, 16, True), (torch.float32, 16, 16, True)],
)
def test_a_trace_of_a_delta_rule_for_a_card_goes_to_the_original_where_there_is_no_kernel(dtype, K, V, refused):
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, v = (torch.empty(2, 5, 4, n, device="cuda", dtype=dtype) for n in (K, V))
    assert functions._ends_a_trace(functions.torch_chunk_gated_delta_rule, (q, q, v), {}) == refused
    assert not functions._ends_a_trace(functions.torch_chunk_gated_delta_rule, (torch.empty(1, 1, 1, K), q, v), {})
