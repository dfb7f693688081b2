"""transformers' models, tiny and with random weights, generate the same tokens with ssmgen's functions as with their own."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import (
    LAYERS,
    MODELS,
    TINY,
    DecodeStep,
    assert_same,
    built,
    convolutions,
    generate,
    in_dtype,
    known,
    modeling,
    of_prompts,
    prompt_calls,
    scans_of_a_layer,
    snapshot,
    states_of,
    unserved,
)
from hf_cases import nothing_stays_patched as nothing_stays_patched
from hf_models import compiled_nodes
from selection import costly, kept
from transformers import CompileConfig

import ssmgen
from ssmgen.calls import api
from ssmgen.compat import hf
from ssmgen.compat.hf.functions import recording, torch_recurrent_gated_delta_rule
from ssmgen.errors import ArgumentError, CaptureError, PatchError

SCANS = {name: next((f for f in functions if "conv" not in f), None) for name, functions in MODELS.items()}
ONE_OF_EACH = ("mamba", "mamba2", "qwen3_5", "kimi_linear", "lfm2")
# Models whose original code does not compile into one graph, patched or not, and why. All other models compile.
NOT_COMPILED = {"qwen4_exp": "data-dependent expression"}
TOKENS = 6
every_model = pytest.mark.parametrize("name", TINY)
COMPILED = ("mamba2", "qwen3_5")  # always: it takes seconds a model


def close(got, want, of):
    """Equal to rounding: within 1e-4 of the largest; errors of models of this depth are some 1e-6."""
    assert (got - want).abs().max() <= 1e-4 * of.abs().max(), (got - want).abs().max()


def test_every_kind_has_a_model():
    assert set(TINY) == set(MODELS)
    assert sum(map(known, TINY)) >= 16


# Generated tokens.


@every_model
def test_greedy_generation_is_unchanged_and_ours(name):
    model = built(name)
    want = generate(model, TOKENS)
    with hf.patch(model) as patch:
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        close(a, b, of=b)
    ours, theirs = states_of(got), states_of(want)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        close(a, b, of=b)

    layers, steps, heads = convolutions(model), TOKENS - 1, scans_of_a_layer(name)
    expected = {"causal_conv1d_update": layers * steps}
    if SCANS[name]:
        expected[SCANS[name]] = layers * steps * heads
    assert patch.calls() == prompt_calls(name, model) | {f"{name}.{f}": hf.Calls(n, 0) for f, n in expected.items()}


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_kernels_serve_every_call(name, dtype):
    """The reference computes on the CPU; the registry says whether these calls have kernels."""
    model = in_dtype(built(name), dtype)
    with hf.patch(model) as patch, recording() as calls:
        generate(model, 2)
    assert not any(c.original for c in patch.calls().values())
    assert len(calls) == sum(c.ssmgen for c in patch.calls().values())
    with torch.no_grad():
        for call in calls:
            reasons = unserved(call.function.__name__, dtype)
            assert ssmgen.supported(call.function, *call.args, arch="sm_90a", **call.kwargs) == (not reasons, reasons)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_left_padding_and_beams(name):
    model = built(name)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    want = generate(model, TOKENS, attention_mask=mask, num_beams=3)
    with hf.patch(model) as patch:
        got = generate(model, TOKENS, attention_mask=mask, num_beams=3)
    assert torch.equal(got.sequences, want.sequences)
    assert patch.calls() and not any(c.original for c in patch.calls().values())


def test_a_model_made_while_patched_is_served_too():
    with hf.patch("mamba2") as patch:
        generate(built("mamba2"), 2)
    assert patch.calls()["mamba2.mamba2_selective_state_update"].ssmgen > 0


def test_two_models_in_one_process():
    first, second = built("mamba2"), built("qwen3_5")
    want = generate(first, TOKENS), generate(second, TOKENS)
    with hf.patch([first]) as one, hf.patch("qwen3_5") as other:
        got = generate(first, TOKENS), generate(second, TOKENS)
    assert all(torch.equal(a.sequences, b.sequences) for a, b in zip(got, want, strict=True))
    assert {label.partition(".")[0] for label in one.calls()} == {"mamba2"}
    assert {label.partition(".")[0] for label in other.calls()} == {"qwen3_5"}


# The fused steps of all models with layers of ours are compiled in test_hf_fuse_steps.py; here, one model of each of their rules.
PATCHED = [name for name in TINY if name not in LAYERS or name in (*ONE_OF_EACH, *NOT_COMPILED)]


@costly(1)
@pytest.mark.parametrize("name", kept(PATCHED, lambda name: name in (*COMPILED, *NOT_COMPILED)))
def test_a_decode_step_compiles_into_one_graph(name):
    model = built(name)
    if name in NOT_COMPILED:
        with torch.no_grad(), pytest.raises(Exception, match=NOT_COMPILED[name]):
            step = DecodeStep(model)
            compiled_nodes(step, step.cache)
    with hf.patch(model), torch.no_grad():
        step = DecodeStep(model)
        if name in NOT_COMPILED:
            with pytest.raises(Exception, match=NOT_COMPILED[name]):
                compiled_nodes(step, step.cache)
            return
        want = step(copy.deepcopy(step.cache))
        got, targets = compiled_nodes(step, copy.deepcopy(step.cache))
    close(got, want, of=want)
    heads = 2 if name == "zamba" else 1
    assert targets.total() == convolutions(model) * (1 + heads if SCANS[name] else 1), targets


@costly(1)
@pytest.mark.parametrize("name", kept(ONE_OF_EACH, lambda name: name in COMPILED))
def test_a_prompt_compiles_into_one_graph(name):
    model, ids = built(name), torch.arange(3, 13).view(2, 5)
    with hf.patch(model), torch.no_grad():
        want = model(input_ids=ids, use_cache=True).logits
        got, targets = compiled_nodes(lambda ids: model(input_ids=ids, use_cache=True).logits, ids)
    close(got, want, of=want)
    assert targets.total() == convolutions(model) * len(of_prompts(name)), targets


@pytest.mark.parametrize("refused", ["activation", "dtype"])
def test_what_we_refuse_is_the_originals_in_a_compiled_step_too(refused):
    model = built("mamba2", hidden_act="gelu") if refused == "activation" else built("mamba2").double()
    torch._dynamo.reset()
    with torch.no_grad():
        step = DecodeStep(model)
        want = step(copy.deepcopy(step.cache))
        with hf.patch(model):
            got = torch.compile(step, backend="eager", fullgraph=True)(copy.deepcopy(step.cache))
    close(got, want, of=want)


def test_a_static_cache_which_transformers_compiles():
    compile_config = CompileConfig(backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True
    model = built("mamba2")
    want = generate(model, TOKENS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with hf.patch(model) as patch:
        got = generate(model, TOKENS, cache_implementation="static", compile_config=compile_config)
    assert torch.equal(got.sequences, want.sequences)
    assert patch.calls() == prompt_calls("mamba2", model), "the steps were compiled: those calls are not counted"
    assert not torch._dynamo.utils.counters["graph_break"]


# The state.


@pytest.mark.parametrize("keep", [True, False])
def test_a_delta_rules_state_is_updated_in_place_and_returned_itself(keep):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, 4, 16) for _ in range(3))
    g, beta = -torch.rand(2, 1, 4), torch.rand(2, 1, 4)
    state = torch.randn(2, 4, 16, 16)
    before = state.clone()
    original = modeling("qwen3_5").torch_recurrent_gated_delta_rule
    want, new = original(q, k, v, g=g, beta=beta, initial_state=before, output_final_state=True, use_qk_l2norm_in_kernel=True)
    got, returned = torch_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=keep, use_qk_l2norm_in_kernel=True, use_cache=True
    )
    assert returned is (state if keep else None)
    close(got, want, of=want)
    close(state, new if keep else before, of=before)


# Calls that are not served stay with the original.


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_training_keeps_the_original(name):
    model = built(name).train()
    ids = torch.arange(10).view(2, 5) + 3

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = gradients()
    with hf.patch(model) as patch, pytest.warns(RuntimeWarning, match="requires grad") as said:
        got = gradients()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert patch.calls() == {label: hf.Calls(0, calls.ssmgen) for label, calls in prompt_calls(name, model).items()}
    assert len([w for w in said if "requires grad" in str(w.message)]) == len(patch.calls()), "once per function and reason"


def test_an_activation_that_we_do_not_have():
    model = built("mamba2", hidden_act="gelu")
    want = generate(model, TOKENS)
    with hf.patch(model) as patch, pytest.warns(RuntimeWarning) as said:
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences)
    calls = patch.calls()
    assert calls["mamba2.causal_conv1d_update"].ssmgen == calls["mamba2.causal_conv1d_fn"].ssmgen == 0
    assert calls["mamba2.mamba2_selective_state_update"] == hf.Calls(3 * (TOKENS - 1), 0), "each function is replaced on its own"
    messages = [str(w.message) for w in said if w.category is RuntimeWarning]
    assert len(messages) == 2 and all("'gelu'" in m and "Mamba2Mixer of layer 0" in m for m in messages), messages
    assert str(patch).count(", first in Mamba2Mixer of layer 0:\n  - activation") == 2


def test_a_dtype_that_we_do_not_have():
    model = built("qwen3_5").double()
    want = generate(model, TOKENS)
    with hf.patch(model) as patch, pytest.warns(RuntimeWarning, match="float64; expected float32"):
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences)
    assert patch.calls()["qwen3_5.causal_conv1d_fn"].ssmgen == 0


def test_an_error_names_the_layer(monkeypatch):
    model = built("mamba2")

    def no_kernel(*args, **kwargs):
        raise CaptureError("spec", "sm_90a", "selective_state_update")

    monkeypatch.setattr("ssmgen.families.selective_state_update.call.selective_state_update", no_kernel)
    with (
        hf.patch(model),
        pytest.raises(CaptureError, match=r"mamba2\.mamba2_selective_state_update, in Mamba2Mixer of layer 0: sm_90a kernel spec"),
    ):
        generate(model, 2)


# Warming.


def test_warm_asks_for_the_kernels_of_every_call_at_every_batch_size(monkeypatch):
    model, asked = built("qwen3_5"), []

    def warm(function, *args, batches=(), **kwargs):
        asked.append((function.__name__, args[0].shape[0], tuple(batches)))
        return 0

    before = snapshot()
    monkeypatch.setattr(api, "warm", warm)
    assert hf.warm(model, batches=[1, 64, 8]) == 0
    units = {
        "causal_conv1d": 4,
        "chunk_gated_delta_rule": 4,
        "causal_conv1d_update": 1,
        "gated_delta_rule": 1,
    }  # of a sequence: KiB; heads of v
    want = {(f, n, tuple(unit * size for size in sizes)) for f, unit in units.items() for n, sizes in ((1, (1, 8, 64)), (2, (8, 64)))}
    assert Counter(asked) == dict.fromkeys(want, convolutions(model))
    assert_same(snapshot(), before)


def test_a_model_is_warmed_by_ssmgens_own_warm_too(monkeypatch):
    model, asked = built("mamba2"), []
    monkeypatch.setattr(hf, "warm", lambda *args, **kwargs: asked.append((args, kwargs)) or 7)
    assert ssmgen.warm(model, batches=[1, 8]) == ssmgen.warm(model, prompt_length=5) == 7
    assert asked == [((model,), {"batches": [1, 8]}), ((model,), {"prompt_length": 5})]


def test_warm_needs_a_device_and_sizes():
    model = built("mamba2")
    with pytest.raises(ArgumentError, match="; expected a CUDA device, where kernels are loaded"):
        hf.warm(model)
    with pytest.raises(PatchError, match="batches"):
        hf.warm(model, batches=[])
    with pytest.raises(PatchError, match="Linear has no layer"):
        hf.warm(torch.nn.Linear(2, 2))
    with pytest.raises(PatchError, match="Linear has no layer"):
        ssmgen.warm(torch.nn.Linear(2, 2), batches=[4])
