"""The findings of fuzzing, one by one: operands that are not plain tensors, rings of the wrong kind, empty axes, and unchecked copies."""

from __future__ import annotations

import fuzz
import pytest
import torch
from fuzz import forms
from fuzz_calls import B, H, K, T, V, rand, ring
from torch import Tensor

import ssmgen
from ssmgen.compat import causal_conv1d, fla, vllm
from ssmgen.errors import ArgumentError

FORMS = {f.id: f for f in forms()}


def call(id: str, **change: object) -> tuple[fuzz.Form, dict]:
    """A form's function, and its arguments with a change."""
    form = FORMS[id]
    return form, fuzz.with_own_memory(form.arguments) | change


def refused(id: str, words: str, **change: object) -> None:
    """Whether the call says these words, and changes nothing."""
    form, given = call(id, **change)
    before = {n: t.clone() for n, t in given.items() if fuzz.is_memory(t)}
    with pytest.raises(ArgumentError, match=words):
        form.function(**given)
    changed = [n for n, t in before.items() if not torch.equal(given[n].nan_to_num(7), t.nan_to_num(7))]
    assert not changed
    if form.public:
        yes, reasons = ssmgen.supported(form.function, **given, arch="sm_90a")
        assert not yes and reasons


ODD = {
    "nested": (lambda t: torch.nested.nested_tensor(list(t)), "is nested; expected a strided tensor"),
    "jagged": (lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged), "is nested; expected a strided tensor"),
    "coo": (lambda t: t.to_sparse(), "is of layout sparse_coo; expected strided"),
    "csr": (lambda t: t.flatten(1).to_sparse_csr(), "is of layout sparse_csr"),
    "mkldnn": (lambda t: t.to_mkldnn(), "is of layout _mkldnn"),
    "quantised": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "is quantised, qint8; expected plain elements"),
    "negated": (lambda t: torch.complex(t, -t).conj().imag, r"is a lazy view \(negated or conjugated\); expected its elements in memory"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("selective_state_update-heads", "x"), ("causal_conv1d-states", "x"), ("causal_conv1d_update-one", "weight"),
        ("combine_splits-splits", "o"), ("gated_rms_norm-heads", "x"), ("gated_delta_rule-one", "v"), ("gated_delta_rule-tokens", "state"),
        ("kda-one", "q"), ("gdn_layer-one", "conv_weight"), ("mamba2_layer-one", "xBC"), ("replay_selective_state_update-two", "x"),
        ("fla.fused_recurrent_kda-padded", "v"), ("flashinfer.merge_state", "s_a"), ("vllm.merge_attn_states", "prefix_lse"),
        ("sglang.causal_conv1d_fn", "weight"), ("trtllm.replay_selective_state_update", "D"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_no_memory_is_named(id, name, kind):
    odd, words = ODD[kind]
    values = FORMS[id].arguments[name]
    if kind == "csr" and values.dim() < 2:
        pytest.skip("no rows")
    refused(id, words if kind == "negated" else f"{name} {words}", **{name: odd(values.clone())})


def test_odd_tensors_in_rings_and_pairs_are_named():
    given = ring()
    refused("gated_delta_rule-ring", "ring.v is of layout sparse_coo", ring=given._replace(v=given.v.to_sparse()))
    refused("combine_splits-pair", r"o\.1 is quantised", o=(rand(B, H, 8), ODD["quantised"][0](rand(B, H, 8))))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (0.5, "ring is a float; expected Ring"),
        ("x", "ring is a str; expected Ring"),
        ([], "ring is a list of 0; expected Ring"),
        (ring()[:3], "ring is a tuple of 3; expected Ring"),
        (object(), "ring is a object; expected Ring"),
    ],
)
@pytest.mark.parametrize("id", ["gated_delta_rule-ring", "kda-ring", "gated_delta_rule_commit-one", "kda_commit-layers"])
def test_what_is_no_ring_is_named(id, wrong, words):
    refused(id, words, ring=wrong)


def test_empty_and_missing_axes():
    refused("gated_delta_rule-tokens", "K", q=rand(B, T, 2, 0), scale=None)
    refused("kda-packed", "state_indices is", state_indices=torch.tensor(1))
    apart = rand(2 * T, H, V).as_strided((B, T, H, V), (4, 32, 8, 1))
    refused("gated_rms_norm-heads", "gate has strides .*; expected one distance between rows", gate=apart)
    refused("mamba2_layer-one", "xBC is", state=rand(4, 0, 4, 8))
    refused("replay_selective_state_update-two", "dt_bias is", dt_bias=rand(H, 0))
    refused("replay_selective_state_update-two", "dt is", dt=rand(B, T, H, 0))
    refused("materialize_selective_state-step", "state_indices is a list", state_indices=[1, 2])
    refused("sglang.fused_recurrent_gated_delta_rule_packed_decode", "channels", initial_state=rand(4, H, 4, 0))
    refused("fla.fused_recurrent_kda-packed", "cu_seqlens is empty", cu_seqlens=torch.zeros(0, dtype=torch.int64))
    refused("vllm.causal_conv1d_update-packed", "conv_state_indices is", conv_state_indices=torch.zeros(2, 0, dtype=torch.int32))


@pytest.mark.parametrize("layer", ["mamba2_layer", "gdn_layer", "kda_layer"])
@pytest.mark.parametrize("form", ["one", "tokens", "accepted"])
def test_a_layers_window_holds_its_history(layer, form):
    channels = FORMS[f"{layer}-{form}"].arguments["conv_weight"].shape[0]
    for width in (0, 1, 9):
        refused(f"{layer}-{form}", "conv_weight is .*; expected .channels, width., width 2 … 8", conv_weight=rand(channels, width))
    refused(f"{layer}-{form}", "conv_state is .*; expected .slots, channels, width - 1 or width", conv_state=rand(4, channels, 2))


# --- drop-in functions


@pytest.mark.parametrize(
    ("id", "change", "words"),
    [
        ("fla.fused_recurrent_gla-padded", {"v": None}, "v is None; expected a tensor"),
        ("fla.fused_recurrent_gla-padded", {"q": rand(8)}, r"q is \[8\]; expected \[B, T, H, K\]"),
        ("fla.fused_recurrent_gla-padded", {"output_final_state": "no"}, "output_final_state is a str; expected True or False"),
        ("fla.fused_recurrent_gla-padded", {"initial_state": torch.ones(2, H, K, 4, dtype=torch.int32)}, "initial_state is int32"),
        ("fla.fused_recurrent_lightning_attn-padded", {"num_layers": 0}, "layer_idx is 1; expected a layer below num_layers"),
        ("flashinfer.gated_delta_rule_decode", {"q": [1.0]}, "q is a list; expected a tensor"),
        ("flashinfer.selective_state_update-one", {"state_batch_indices": 3}, "state_batch_indices is a int"),
        ("flashinfer.merge_states", {"s": torch.zeros(2, 3, 4, dtype=torch.bool)}, "lse is bool"),
        ("vllm.causal_conv1d_fn", {"query_start_loc": None}, "query_start_loc is None; expected a tensor"),
        ("vllm.selective_state_update-step", {"dt_softplus": "no", "out": None}, "dt_softplus is a str; expected True or False"),
        ("sglang.selective_state_update-step", {"disable_state_update": "no"}, "disable_state_update is a str; expected True or False"),
        ("sglang.fused_sigmoid_gating_delta_rule_update-kda", {"a": rand(7)}, r"- g is \[7\]"),
        ("causal_conv1d.causal_conv1d_varlen_states", {"state_len": -1}, "state_len is -1"),
        ("causal_conv1d.causal_conv1d_varlen_states", {"cu_seqlens": torch.tensor([0.0, 2.0])}, "cu_seqlens is float32 on cpu; expected"),
    ],
)  # fmt: skip
def test_drop_in_functions_check_before_they_look(id, change, words):
    refused(id, words, **change)


def test_an_unknown_keyword_is_a_type_error():
    form, given = call("flashinfer.gated_delta_rule_decode", q=[1.0], disable=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'disable'"):
        form.function(**given)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ArgumentError) as e:
        fla.fused_recurrent_gla([1.0], rand(2), None, state_v_first=1, cu_seqlens=torch.tensor(3))
    assert len(e.value.problems) == 4, e.value.problems


def test_a_call_like_one_before_is_still_checked():
    """Types are remembered; axes and layouts are looked at every time."""
    form, given = call("flashinfer.merge_state")
    form.function(**given)
    refused("flashinfer.merge_state", r"s_a is \[\]; expected \[n, heads\]", s_a=torch.tensor(1.0))
    refused("flashinfer.merge_state", "s_a is of layout sparse_coo", s_a=rand(B, H).to_sparse())
    form.function(**given)


def test_indices_of_two_types_are_integers():
    """Indices of 32 and 64 bits become the same; a float index stays a float, and is refused."""
    form, given = call("flashinfer.gated_delta_rule_decode_pretranspose-pool", output_state_indices=torch.tensor([0, 2]))
    form.function(**given)
    refused(form.id, "state_indices is torch.float32", initial_state_indices=torch.tensor([1.0, 3.0]))


def test_offsets_beyond_the_tokens_end_there():
    x = rand(5, 3)
    states = causal_conv1d.causal_conv1d_varlen_states(x, torch.tensor([0, 2, 9]), 3)
    assert torch.equal(states[0], torch.cat((torch.zeros(1, 3), x[:2])).t()) and torch.equal(states[1], x[4:].expand(3, 3).t())


MERGE = "vllm.merge_attn_states-context"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"suffix_output": rand(2, H, 8)}, r"suffix_output is \[2, 4, 8\]; expected \[3, 4, 8\], the shape of output"),
        ({"suffix_output": rand(1, H, 8)}, "suffix_output is"),
        ({"suffix_lse": rand(H, 2)}, r"suffix_lse is \[4, 2\]; expected \[4, 3\], the shape of output_lse"),
        ({"prefill_tokens_with_context": -1}, "prefill_tokens_with_context is -1; expected a number of tokens"),
        ({"prefill_tokens_with_context": 1.5}, "prefill_tokens_with_context is a float; expected an integer or None"),
        ({"prefill_tokens_with_context": 1, "output": rand(1, H, 8).expand(T, H, 8)}, "output has strides .*share memory"),
    ],
)
def test_a_merge_is_checked_as_a_whole_before_any_of_it_is_written(change, words):
    refused(MERGE, words, **change)


def test_a_merge_whose_copy_would_read_what_it_has_written():
    _, given = call(MERGE)
    rows = rand(2 * T, H, 8)
    given |= {"output": rows[:T], "suffix_output": rows[1 : T + 1]}
    before = rows.clone()
    with pytest.raises(ArgumentError, match="output overlaps suffix_output in memory"):
        vllm.merge_attn_states(**given)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("part", ["prefix", "suffix"])
def test_a_merge_in_place_of_one_part(part):
    _, given = call(MERGE)
    want: dict[str, Tensor] = {n: t.clone() for n, t in given.items() if isinstance(t, Tensor)}
    vllm.merge_attn_states(**given | {n: want[n] for n in ("output", "output_lse")})
    given |= {"output": given[f"{part}_output"], "output_lse": given[f"{part}_lse"]}
    vllm.merge_attn_states(**given)
    assert all(torch.equal(given[n], want[n]) for n in ("output", "output_lse"))


def test_more_tokens_with_context_than_there_are():
    _, given = call(MERGE)
    want = given["output"].clone()
    vllm.merge_attn_states(**given | {"output": want, "prefill_tokens_with_context": None})
    vllm.merge_attn_states(**given | {"prefill_tokens_with_context": T + 4})
    assert torch.equal(given["output"], want)
