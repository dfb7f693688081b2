"""Whole decode layers of transformers' models in one call, `patch(fuse=True)`: the same tokens and states; the original for all else."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import (
    INDEXED,
    LAYERS,
    DecodeStep,
    assert_close,
    assert_same_generation,
    built,
    change_rates,
    convolutions,
    fused_calls,
    fused_label,
    fused_operator,
    gated_norms,
    generate,
    known,
    mixers,
    norms_of_a_pass,
    of_prompts,
    takes_cache,
    unserved,
)
from hf_cases import nothing_stays_patched as nothing_stays_patched
from hf_cases import the_originals_are_back as the_originals_are_back

import ssmgen
from ssmgen.compat import hf
from ssmgen.compat.hf.functions import recording

TOKENS = 6
every_kind = pytest.mark.parametrize("name", LAYERS)
one_of_each = pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])

# Kinds of mixers that differ from the tiny model's: by name, with changes of its configuration
VARIANTS = {
    "mamba2-g1": ("mamba2", {"n_groups": 1}),
    "mamba2-g4": ("mamba2", {"n_groups": 4}),
    "mamba2-no-bias": ("mamba2", {"use_conv_bias": False}),
    "mamba2-biased": ("mamba2", {"use_bias": True}),
    "mamba2-width-2": ("mamba2", {"conv_kernel": 2}),
    "bamba-g4": ("bamba", {"mamba_n_groups": 4}),
    "falcon_h1-normed": ("falcon_h1", {"mamba_rms_norm": True}),
    "falcon_h1-normed-first": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "falcon_h1-gated": ("falcon_h1", {"mamba_rms_norm": False}),
    "falcon_h1-multiplied": ("falcon_h1", {"ssm_in_multiplier": 0.5, "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 3.0]}),
    "qwen3_5-heads-alike": ("qwen3_5", {"linear_num_key_heads": 4}),
    "qwen3_next-heads-alike": ("qwen3_next", {"linear_num_key_heads": 4}),
    "qwen3_5-wide-values": ("qwen3_5", {"linear_value_head_dim": 32}),
    "kimi_linear": ("kimi_linear", {}),
    "glm5_next-unbounded": ("glm5_next", {"linear_lower_bound": None}),
    "bailing_hybrid-unbounded": ("bailing_hybrid", {"kda_safe_gate": False}),
}


# Generated tokens.


@every_kind
def test_greedy_generation_is_unchanged_and_every_step_is_one_call_per_layer(name, recwarn):
    model = built(name)
    want = generate(model, TOKENS)
    with hf.patch(model, fuse=True) as patch, recording() as calls:
        got = generate(model, TOKENS)
    assert_same_generation(got, want)
    assert patch.calls() == fused_calls(name, model, TOKENS - 1)
    layers = len(mixers(model))
    prompt = dict.fromkeys(of_prompts(name).values(), layers)
    prompt |= {"gated_rms_norm": len(found)} if (found := gated_norms(model)) else {}
    prompt["rms_norm"] = TOKENS * sum(norms_of_a_pass(model).values())  # of the steps, too
    if name in INDEXED:
        prompt["rms_norm"] = sum(c.function.__name__ == "rms_norm" for c in calls)
    assert Counter(c.function.__name__ for c in calls) == prompt | {fused_operator(name)[1]: layers * (TOKENS - 1)}
    assert not [w for w in recwarn if w.category is RuntimeWarning]


def distinct(model):
    """The model, with weights that differ where a new model has ones."""
    for mixer in mixers(model):
        norm, gate = (mixer.norm, mixer) if hasattr(mixer, "norm") else (mixer.o_norm, mixer.forget_gate)
        for parameter in (*norm.parameters(), gate.dt_bias, getattr(gate, "D", gate.dt_bias)):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize(("name", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_variants_of_a_kind(name, changes):
    model = distinct(built(name, **changes))
    if changes.get("mamba_rms_norm"):
        x = torch.zeros(2, 1, mixers(model)[0].intermediate_size)
        if mixers(model)[0].norm(x, x).shape != x.shape:
            pytest.skip("this transformers' own norm of a step mixes the sequences of a batch")
    want = generate(model, TOKENS)
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, TOKENS)
    assert_same_generation(got, want)
    assert patch.calls() == fused_calls(name, model, TOKENS - 1)


@pytest.mark.parametrize("first", [True, False], ids=["norm-first", "gate-first"])
def test_falcon_h1s_norm_of_one_sequence_and_of_two(first):
    """One sequence is normalised as in this version of transformers. Two sequences equal each one alone."""
    model = distinct(built("falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=first))
    ids, how = torch.arange(3, 13).view(2, 5), {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}

    def tokens(ids):
        return model.generate(ids, attention_mask=torch.ones_like(ids), **how)

    want = torch.cat([tokens(row[None]) for row in ids])
    with hf.patch(model, fuse=True) as patch:
        assert torch.equal(torch.cat([tokens(row[None]) for row in ids]), want)
        assert torch.equal(tokens(ids), want)
    assert patch.calls()[fused_label("falcon_h1")] == hf.Calls(3 * 2 * TOKENS, 0)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_kernels_serve_every_call(name, dtype):
    """The reference computes on the CPU; the registry says whether these calls have kernels."""
    model = built(name).to(dtype)
    with hf.patch(model, fuse=True) as patch, recording() as calls:
        got = generate(model, 3)
    assert patch.calls() == fused_calls(name, model, 2)
    assert all(torch.isfinite(logits).all() for logits in got.logits)
    with torch.no_grad():
        for call in calls:
            reasons = unserved(call.function.__name__, dtype)
            assert ssmgen.supported(call.function, *call.args, arch="sm_90a", **call.kwargs) == (not reasons, reasons)


def test_multipliers_of_another_dtype_than_the_weights():
    """Falcon-H1's are a buffer, which stays f32 where only parameters were loaded in bf16."""
    model = built("falcon_h1")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert all(mixer.mup_vector.dtype is torch.float32 for mixer in mixers(model))
    want = generate(model, 3)
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, 3)
    assert patch.calls()[fused_label("falcon_h1")].original == 0
    assert all((a.float() - b.float()).abs().max() <= 0.05 * b.abs().max() for a, b in zip(got.logits, want.logits, strict=True))


def test_auto_fuses_all_kinds():
    with hf.patch(fuse=True) as patch:
        assert {fused_label(name) for name in LAYERS if known(name)} <= set(patch.replaced)
        generate(built("mamba2"), 2)
    assert patch.calls()[fused_label("mamba2")].ssmgen > 0
    with hf.patch() as patch:
        assert not {fused_label(name) for name in LAYERS} & set(patch.replaced)


def test_which_models_are_fusible(monkeypatch):
    """Those that have a layer with a decode step, which will be fused here."""
    assert all(hf.fusible(built(name)) == (name in LAYERS) for name in ("mamba", "lfm2", "mamba2", "qwen3_5", "olmo_hybrid"))
    assert not hf.fusible(built("mamba2", hidden_act="gelu")) and not hf.fusible(built("mamba2").double())
    assert not hf.fusible(torch.nn.Linear(2, 2))
    offloaded = built("mamba2")
    for mixer in mixers(offloaded):
        mixer.conv1d._hf_hook = Hook(offload=True)
    assert not hf.fusible(offloaded)


# Calls that stay with the original.


@one_of_each
def test_training_and_steps_under_grad_keep_the_original(name):
    """The layer gives no count and no warning; the functions within it give them."""
    model = built(name).requires_grad_(False)
    with torch.no_grad():
        step = DecodeStep(model)
    want = step(copy.deepcopy(step.cache))
    with hf.patch(model, fuse=True) as patch, torch.enable_grad():
        got = step(copy.deepcopy(step.cache))
    assert_close(got, want)
    assert fused_label(name) not in patch.calls() and patch.calls()[f"{name}.causal_conv1d_update"] == hf.Calls(convolutions(model), 0)


@one_of_each
def test_a_mask_at_a_step_is_the_originals(name):
    model = built(name)
    with torch.no_grad():
        step = DecodeStep(model)
        layer = mixers(model)[0]
        x, mask = torch.randn(2, 1, 32), torch.tensor([[1], [0]])
        want = layer(x, **takes_cache(layer, copy.deepcopy(step.cache)), attention_mask=mask)
        with hf.patch(model, fuse=True) as patch:
            got = layer(x, **takes_cache(layer, copy.deepcopy(step.cache)), attention_mask=mask)
            assert fused_label(name) not in patch.calls()
            layer(x, **takes_cache(layer, copy.deepcopy(step.cache)))
            layer(x, copy.deepcopy(step.cache), None)
            assert patch.calls()[fused_label(name)] == hf.Calls(2, 0)
    assert_close(got, want)


@one_of_each
def test_prompts_of_one_token_and_without_a_cache(name):
    model, ids = built(name), torch.tensor([[5], [6]])
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=True).logits, model(input_ids=ids, use_cache=False).logits
        with hf.patch(model, fuse=True) as patch:
            got = model(input_ids=ids, use_cache=True).logits, model(input_ids=ids, use_cache=False).logits
    norms = {label: hf.Calls(2 * count, 0) for label, count in norms_of_a_pass(model).items()}
    assert patch.calls() == {fused_label(name): hf.Calls(2 * convolutions(model), 0)} | norms
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_an_activation_that_layers_do_not_have():
    model = built("mamba2", hidden_act="gelu")
    want = generate(model, TOKENS)
    with hf.patch(model, fuse=True) as patch, pytest.warns(RuntimeWarning, match="gelu"):
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences) and fused_label("mamba2") not in patch.calls()


@one_of_each
def test_a_mixer_that_is_refused_is_not_asked_again(name, monkeypatch):
    model = built(name).double()
    want, asked = generate(model, TOKENS), []
    module, operator = fused_operator(name)
    ours = getattr(module, operator)
    monkeypatch.setattr(module, operator, lambda *args, **kwargs: asked.append(1) or ours(*args, **kwargs))
    with hf.patch(model, fuse=True) as patch, pytest.warns(RuntimeWarning) as said:
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences)
    layers = len(mixers(model))
    assert len(asked) == layers and patch.calls()[fused_label(name)] == hf.Calls(0, layers * (TOKENS - 1))
    messages = [str(w.message) for w in said if fused_label(name) in str(w.message)]
    assert len(messages) == 1 and "float64" in messages[0] and f"{LAYERS[name]} of layer 0" in messages[0], messages


@one_of_each
def test_a_refused_mixer_is_forgotten_with_its_model(name):
    model = built(name).double()
    with hf.patch(name, fuse=True), pytest.warns(RuntimeWarning):
        generate(model, 2)
        gone = [weakref.ref(mixer) for mixer in mixers(model)]
        del model
        gc.collect()
        assert not any(ref() for ref in gone)


class Hook:
    """A hook such as accelerate puts on every layer of a model that is spread over devices."""

    def __init__(self, **attributes):
        self.calls = 0
        vars(self).update(attributes)

    def pre_forward(self, module):
        self.calls += 1

    def post_forward(self, module, output):
        pass


@pytest.mark.parametrize(
    ("attributes", "ours"), [({"offload": False}, 3), ({"offload": True}, 2), ({}, 2)], ids=["in-place", "offloaded", "of-another-kind"]
)
def test_a_layer_whose_weights_accelerate_brings_is_the_originals(attributes, ours):
    """Accelerate loads the weights when the layer is called. The fused code does not call the convolution."""
    model, hook = built("mamba2"), Hook(**attributes)
    mixers(model)[0].conv1d._hf_hook = hook
    want, before = generate(model, TOKENS), hook.calls
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, TOKENS)
    assert_same_generation(got, want)
    assert patch.calls()[fused_label("mamba2")] == hf.Calls(ours * TOKENS, 0)
    assert hook.calls - before == (before if ours == 2 else 0), "once per step and prompt, or never"


# Weights that change.


@pytest.mark.parametrize("how", ["in place", "another parameter", "other data", "a state dict"])
def test_a_change_of_the_rates_is_seen(how):
    model, other = built("mamba2"), built("mamba2")
    change_rates(other, how)
    want = generate(other, TOKENS)
    with hf.patch(model, fuse=True):
        before = generate(model, TOKENS)
        change_rates(model, how)
        got = generate(model, TOKENS)
    assert_same_generation(got, want)
    assert not torch.equal(got.logits[-1], before.logits[-1])


def test_a_model_made_in_inference_mode():
    """The weights of such a model have no version."""
    with torch.inference_mode():
        model = built("mamba2")
        want = generate(model, TOKENS)
        with hf.patch(model, fuse=True) as patch:
            got = generate(model, TOKENS)
    assert_same_generation(got, want)
    assert patch.calls() == fused_calls("mamba2", model, TOKENS - 1)
