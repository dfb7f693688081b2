"""Whole decode layers of transformers' models in one call, `patch(fuse=True)`: the same tokens and states, and the original for all else."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17: pip install 'ssmgen[hf]'")

from hf_cases import TINY, DecodeStep, assert_same, built, convolutions, generate, last_logits, modeling, snapshot, states_of
from transformers import CompileConfig

import ssmgen
from ssmgen import api
from ssmgen.compat import hf, hf_layers
from ssmgen.compat.hf_functions import recording
from ssmgen.compat.hf_layers import LAYERS
from ssmgen.errors import CaptureError, CompileError

TOKENS = 6
OPERATORS = {name: "gdn_layer" if name.startswith("qwen") else "mamba2_layer" for name in LAYERS}
every_kind = pytest.mark.parametrize("name", LAYERS)
one_of_each = pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])

# Kinds of mixers that differ from the tiny model's: by name, with what its configuration is told
VARIANTS = {
    "mamba2-g1": ("mamba2", {"n_groups": 1}),
    "mamba2-g8": ("mamba2", {"n_groups": 8}),
    "mamba2-no-bias": ("mamba2", {"use_conv_bias": False}),
    "mamba2-biased": ("mamba2", {"use_bias": True}),
    "mamba2-width-2": ("mamba2", {"conv_kernel": 2}),
    "bamba-g8": ("bamba", {"mamba_n_groups": 8}),
    "falcon_h1-normed": ("falcon_h1", {"mamba_rms_norm": True}),
    "falcon_h1-normed-first": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "falcon_h1-gated": ("falcon_h1", {"mamba_rms_norm": False}),
    "falcon_h1-multiplied": ("falcon_h1", {"ssm_in_multiplier": 0.5, "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 3.0]}),
    "qwen3_5-heads-alike": ("qwen3_5", {"linear_num_key_heads": 4}),
    "qwen3_next-heads-alike": ("qwen3_next", {"linear_num_key_heads": 4}),
    "qwen3_5-wide-values": ("qwen3_5", {"linear_key_head_dim": 8, "linear_value_head_dim": 16}),
}


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    before = snapshot(), {name: vars(mixer_class(name))["forward"] for name in LAYERS}
    yield
    assert not hf._active
    assert_same(snapshot(), before[0])
    assert all(vars(mixer_class(name))["forward"] is forward for name, forward in before[1].items()), "the identical forward"


def mixer_class(name):
    return getattr(modeling(name), LAYERS[name].name)


def mixers(model):
    classes = tuple(mixer_class(name) for name in LAYERS)
    return [layer for layer in model.modules() if isinstance(layer, classes)]


def label(name):
    return f"{name}.{LAYERS[name].name}"


def close(got, want):
    """Equal to rounding: within 1e-4 of the largest."""
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got - want).abs().max() <= 1e-4 * want.abs().max(), (got - want).abs().max()


def same(got, want):
    """Of generations: tokens, logits, states and windows."""
    assert torch.equal(got.sequences, want.sequences)
    ours, theirs = states_of(got), states_of(want)
    assert len(ours) == len(theirs) > 0
    for a, b in zip((*got.logits, *ours), (*want.logits, *theirs), strict=True):
        close(a, b)


def fused(name, model, steps, originals=0):
    """The calls of a generation of so many decode steps."""
    expected = {f"{name}.causal_conv1d_fn": hf.Calls(convolutions(model), 0)}
    return expected | {label(name): hf.Calls(convolutions(model) * steps - originals, originals)}


# What they generate.


@every_kind
def test_greedy_generation_is_unchanged_and_every_step_is_one_call_per_layer(name, recwarn):
    model = built(name)
    want = generate(model, TOKENS)
    with hf.patch(model, fuse=True) as patch, recording() as calls:
        got = generate(model, TOKENS)
    same(got, want)
    assert patch.calls() == fused(name, model, TOKENS - 1)
    layers = len(mixers(model))
    assert Counter(c.function.__name__ for c in calls) == {"causal_conv1d": layers, OPERATORS[name]: layers * (TOKENS - 1)}
    assert not [w for w in recwarn if w.category is RuntimeWarning]


@pytest.mark.parametrize(("name", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_variants_of_a_kind(name, changes):
    model = built(name, **changes)
    for mixer in mixers(model):  # weights that a new model has as ones
        for parameter in (mixer.norm.weight if hasattr(mixer, "norm") else None, mixer.D if hasattr(mixer, "D") else None, mixer.dt_bias):
            if parameter is not None:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    want = generate(model, TOKENS)
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, TOKENS)
    same(got, want)
    assert patch.calls() == fused(name, model, TOKENS - 1)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_kernels_serve_every_call(name, dtype):
    """On the CPU the reference computes; that there are kernels for these calls is asked of the registry."""
    model = built(name).to(dtype)
    with hf.patch(model, fuse=True) as patch, recording() as calls:
        got = generate(model, 3)
    assert patch.calls() == fused(name, model, 2)
    assert all(torch.isfinite(logits).all() for logits in got.logits)
    with torch.no_grad():
        for call in calls:
            assert ssmgen.supported(call.function, *call.args, arch="sm_90a", **call.kwargs) == (True, [])


def test_multipliers_of_another_dtype_than_the_weights():
    """Falcon-H1's are a buffer, which stays f32 where only parameters were loaded in bf16."""
    model = built("falcon_h1")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert all(mixer.mup_vector.dtype is torch.float32 for mixer in mixers(model))
    want = generate(model, 3)
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, 3)
    assert patch.calls()[label("falcon_h1")].original == 0
    assert all((a.float() - b.float()).abs().max() <= 0.05 * b.abs().max() for a, b in zip(got.logits, want.logits, strict=True))


def test_auto_fuses_all_kinds():
    with hf.patch(fuse=True) as patch:
        assert {label(name) for name in LAYERS} <= set(patch.replaced)
        generate(built("mamba2"), 2)
    assert patch.calls()[label("mamba2")].ssmgen > 0
    with hf.patch() as patch:
        assert not {label(name) for name in LAYERS} & set(patch.replaced)


def test_which_models_are_fusible():
    assert all(hf.fusible(built(name)) == (name in LAYERS) for name in ("mamba", "lfm2", "mamba2", "qwen3_5", "olmo_hybrid"))


# What stays with the original.


@one_of_each
def test_training_and_steps_under_grad_keep_the_original(name):
    """No count and no warning of the layer: the functions within it say what there is to say."""
    model = built(name).requires_grad_(False)
    with torch.no_grad():
        step = DecodeStep(model)
    want = step(copy.deepcopy(step.cache))
    with hf.patch(model, fuse=True) as patch, torch.enable_grad():
        got = step(copy.deepcopy(step.cache))
    close(got, want)
    assert label(name) not in patch.calls() and patch.calls()[f"{name}.causal_conv1d_update"] == hf.Calls(convolutions(model), 0)


@one_of_each
def test_a_mask_at_a_step_is_the_originals(name):
    model = built(name)
    with torch.no_grad():
        step = DecodeStep(model)
        layer = mixers(model)[0]
        x, mask = torch.randn(2, 1, 32), torch.tensor([[1], [0]])
        want = layer(x, cache_params=copy.deepcopy(step.cache), attention_mask=mask)
        with hf.patch(model, fuse=True) as patch:
            got = layer(x, cache_params=copy.deepcopy(step.cache), attention_mask=mask)
            assert label(name) not in patch.calls()
            layer(x, cache_params=copy.deepcopy(step.cache))
            layer(x, copy.deepcopy(step.cache), None)
            assert patch.calls()[label(name)] == hf.Calls(2, 0)
    close(got, want)


@one_of_each
def test_prompts_of_one_token_and_without_a_cache_are_the_originals(name):
    model, ids = built(name), torch.tensor([[5], [6]])
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=True).logits, model(input_ids=ids, use_cache=False).logits
        with hf.patch(model, fuse=True) as patch:
            got = model(input_ids=ids, use_cache=True).logits, model(input_ids=ids, use_cache=False).logits
    assert label(name) not in patch.calls()
    for a, b in zip(got, want, strict=True):
        close(a, b)


def test_an_activation_that_layers_do_not_have():
    model = built("mamba2", hidden_act="gelu")
    want = generate(model, TOKENS)
    with hf.patch(model, fuse=True) as patch, pytest.warns(RuntimeWarning, match="gelu"):
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences) and label("mamba2") not in patch.calls()


@one_of_each
def test_a_mixer_that_is_refused_is_not_asked_again(name, monkeypatch):
    model = built(name).double()
    want, asked = generate(model, TOKENS), []
    step = getattr(modeling(name), LAYERS[name].name)
    operator = getattr(hf_layers, "native_gdn" if name.startswith("qwen") else "native_mamba2")
    ours = getattr(operator, OPERATORS[name])
    monkeypatch.setattr(operator, OPERATORS[name], lambda *args, **kwargs: asked.append(1) or ours(*args, **kwargs))
    with hf.patch(model, fuse=True) as patch, pytest.warns(RuntimeWarning) as said:
        got = generate(model, TOKENS)
    assert torch.equal(got.sequences, want.sequences)
    layers = len(mixers(model))
    assert len(asked) == layers and patch.calls()[label(name)] == hf.Calls(0, layers * (TOKENS - 1))
    messages = [str(w.message) for w in said if label(name) in str(w.message)]
    assert len(messages) == 1 and "float64" in messages[0] and f"{step.__name__} of layer 0" in messages[0], messages


@one_of_each
def test_a_refused_mixer_is_forgotten_with_its_model(name):
    model = built(name).double()
    with hf.patch(name, fuse=True), pytest.warns(RuntimeWarning):
        generate(model, 2)
        gone = [weakref.ref(mixer) for mixer in mixers(model)]
        del model
        gc.collect()
        assert not any(ref() for ref in gone)


def test_what_is_made_of_weights_goes_with_the_model():
    gc.collect()
    before = len(hf_layers._rates)
    model = built("mamba2")
    with hf.patch(model, fuse=True):
        generate(model, 2)
    assert len(hf_layers._rates) == before + len(mixers(model))
    del model
    gc.collect()
    assert len(hf_layers._rates) == before


def test_weights_that_accelerate_brings_are_the_originals():
    """Its hooks bring a layer's weights when the layer is called, and a fused step calls neither the convolution nor the norm."""
    model = built("mamba2")
    mixers(model)[0].conv1d._hf_hook = mixers(model)[1].norm._hf_hook = type(
        "Hook", (), {"pre_forward": lambda *a: None, "post_forward": lambda *a: None}
    )()
    want = generate(model, TOKENS)
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, TOKENS)
    same(got, want)
    assert patch.calls()[label("mamba2")] == hf.Calls(TOKENS - 1, 0), "of the layer without a hook"


# Weights that change.


def changed(model, how):
    with torch.no_grad():
        for mixer in mixers(model):
            new = mixer.A_log + 1.0
            if how == "in place":
                mixer.A_log.copy_(new)
            elif how == "another parameter":
                mixer.A_log = torch.nn.Parameter(new)
            elif how == "other data":
                mixer.A_log.data = new
        if how == "a state dict":
            model.load_state_dict({n: p + 1.0 if n.endswith("A_log") else p for n, p in model.state_dict().items()})


@pytest.mark.parametrize("how", ["in place", "another parameter", "other data", "a state dict"])
def test_a_change_of_the_rates_is_seen(how):
    model, other = built("mamba2"), built("mamba2")
    changed(other, how)
    want = generate(other, TOKENS)
    with hf.patch(model, fuse=True):
        before = generate(model, TOKENS)
        changed(model, how)
        got = generate(model, TOKENS)
    same(got, want)
    assert not torch.equal(got.logits[-1], before.logits[-1])


def test_a_model_made_in_inference_mode():
    """Its weights have no version."""
    with torch.inference_mode():
        model = built("mamba2")
        want = generate(model, TOKENS)
        with hf.patch(model, fuse=True) as patch:
            got = generate(model, TOKENS)
    same(got, want)
    assert patch.calls() == fused("mamba2", model, TOKENS - 1)


# The cache.


@every_kind
def test_left_padding_and_beams(name):
    """The cache is expanded, and reordered in each step."""
    model = built(name)
    how = {"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]), "num_beams": 3}
    want = generate(model, TOKENS, **how)
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, TOKENS, **how)
    assert torch.equal(got.sequences, want.sequences)
    assert patch.calls()[label(name)] == hf.Calls(convolutions(model) * (TOKENS - 1), 0)


@one_of_each
def test_a_cache_goes_on_at_another_batch_size_and_beside_its_copy(name):
    model = built(name)

    def logits():
        step = DecodeStep(model)
        found = [step(step.cache)]
        copied = copy.deepcopy(step.cache)
        found += [step(step.cache), step(copied), step(copied)]
        step.cache.batch_repeat_interleave(2)
        step.token = step.token.repeat_interleave(2, 0)
        found.append(step(step.cache))
        step.cache.batch_select_indices(torch.tensor([2]))
        step.token = step.token[2:3]
        return [*found, step(step.cache), step(step.cache)]

    with torch.no_grad():
        want = logits()
        with hf.patch(model, fuse=True) as patch:
            got = logits()
    for a, b in zip(got, want, strict=True):
        close(a, b)
    assert patch.calls()[label(name)] == hf.Calls(len(want) * convolutions(model), 0)


@one_of_each
def test_counts_of_readers_belong_to_a_layer_of_the_cache(name):
    model = built(name)
    with hf.patch(model, fuse=True), torch.no_grad():
        step = DecodeStep(model)
        copied = copy.deepcopy(step.cache)
        step(step.cache)
        layers = [layer for layer in step.cache.layers if hasattr(layer, "_ssmgen_arrivals")]
        kept = [layer._ssmgen_arrivals for layer in layers]
        step(step.cache)
        assert len(layers) == len(mixers(model)) == len({counts.data_ptr() for counts in kept})
        assert all(layer._ssmgen_arrivals is counts and not counts.any() for layer, counts in zip(layers, kept, strict=True))
        step(copied)
        assert not {counts.data_ptr() for counts in kept} & {
            layer._ssmgen_arrivals.data_ptr() for layer in copied.layers if hasattr(layer, "_ssmgen_arrivals")
        }


def test_counts_that_a_capture_makes_are_not_kept(monkeypatch):
    """They are zeros only when the graph is replayed."""
    layer, state = type("Layer", (), {})(), torch.zeros(2, 4, 8, 8)
    monkeypatch.setattr(hf_layers, "is_captured", lambda tensor: True)
    assert hf_layers.arrivals(layer, 2, state).shape == (2, 2) and not vars(layer)
    monkeypatch.setattr(hf_layers, "is_captured", lambda tensor: False)
    kept = hf_layers.arrivals(layer, 2, state)
    monkeypatch.setattr(hf_layers, "is_captured", lambda tensor: True)
    assert hf_layers.arrivals(layer, 2, state) is kept
    assert hf_layers.arrivals(layer, 2, state[:1]).shape == (1, 2) and layer._ssmgen_arrivals is kept


def test_rates_that_a_capture_makes_are_not_kept(monkeypatch):
    """A graph computes them of the weights that it finds when it is replayed."""
    mixer = mixers(built("mamba2"))[0]
    monkeypatch.setattr(hf_layers, "is_captured", lambda tensor: True)
    with torch.no_grad():
        assert hf_layers.rates(mixer) is not hf_layers.rates(mixer) and mixer not in hf_layers._rates
        monkeypatch.setattr(hf_layers, "is_captured", lambda tensor: False)
        assert hf_layers.rates(mixer) is hf_layers.rates(mixer)


def test_long_generations_keep_no_objects():
    model = built("mamba2")
    with hf.patch(model, fuse=True), torch.no_grad():
        step = DecodeStep(model)
        counts = []
        for steps in (5, 10, 40):
            last_logits(step, step.cache, steps)
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 30, counts


# Compiled.


def compiled_nodes(step, *args):
    """(result of the step compiled into one graph, how often each of our operators is called in it)"""
    targets = Counter()

    def backend(graph, inputs):
        targets.update(str(node.target).split(".")[1] for node in graph.graph.nodes if str(node.target).startswith("ssmgen."))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(step, backend=backend, fullgraph=True)(*args), targets


@every_kind
def test_a_decode_step_compiles_into_one_graph(name):
    model = built(name)
    with hf.patch(model, fuse=True) as patch, torch.no_grad():
        step = DecodeStep(model)
        want = step(copy.deepcopy(step.cache))
        counted = patch.calls()
        got, targets = compiled_nodes(step, copy.deepcopy(step.cache))
    close(got, want)
    assert targets == {OPERATORS[name]: len(mixers(model))}
    assert patch.calls() == counted


def test_a_compiled_step_follows_its_weights():
    model = built("mamba2")
    with hf.patch(model, fuse=True), torch.no_grad():
        step = DecodeStep(model)
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        torch._dynamo.reset()
        compiled(copy.deepcopy(step.cache))
        changed(model, "in place")
        close(compiled(copy.deepcopy(step.cache)), step(copy.deepcopy(step.cache)))


@pytest.mark.parametrize("name", [name for name in LAYERS if name in ("mamba2", "qwen3_5", "qwen3_next")])
def test_a_static_cache_which_transformers_compiles(name):
    compile_config = CompileConfig(backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True
    model = built(name)
    want = generate(model, TOKENS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with hf.patch(model, fuse=True) as patch:
        got = generate(model, TOKENS, cache_implementation="static", compile_config=compile_config)
    assert torch.equal(got.sequences, want.sequences)
    assert patch.calls() == {f"{name}.causal_conv1d_fn": hf.Calls(convolutions(model), 0)}, "the steps were compiled: not counted"
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_dtype_that_layers_do_not_have_is_the_originals_in_a_compiled_step_too():
    model = built("mamba2").double()
    with torch.no_grad():
        step = DecodeStep(model)
        want = step(copy.deepcopy(step.cache))
        with hf.patch(model, fuse=True):
            got, targets = compiled_nodes(step, copy.deepcopy(step.cache))
    close(got, want)
    assert not targets


# Patches.


def test_patches_overlap():
    model = built("mamba2")
    original = mixer_class("mamba2").forward
    plain = hf.patch(model)
    assert mixer_class("mamba2").forward is original
    whole = hf.patch(model, fuse=True)
    again = hf.patch(model, fuse=True)
    generate(model, 2)
    assert whole.calls() == again.calls() == fused("mamba2", model, 1)
    assert plain.calls() == {"mamba2.causal_conv1d_fn": hf.Calls(3, 0)}
    whole.undo()
    assert mixer_class("mamba2").forward is not original
    again.undo()
    assert mixer_class("mamba2").forward is original
    generate(model, 2)
    assert plain.calls()["mamba2.mamba2_selective_state_update"] == hf.Calls(3, 0)
    plain.undo()


def test_a_forward_with_other_parameters_is_left_alone(monkeypatch):
    def forward(self, hidden_states, cache=None):
        return hidden_states

    monkeypatch.setattr(mixer_class("mamba2"), "forward", forward)
    with pytest.warns(RuntimeWarning, match=r"Mamba2Mixer: its forward takes self, hidden_states, cache, not"):
        patch = hf.patch("mamba2", fuse=True)
    with patch:
        assert mixer_class("mamba2").forward is forward and label("mamba2") not in patch.replaced
    monkeypatch.undo()


@pytest.mark.parametrize("error", [CaptureError("spec", "sm_90a", "operator"), CompileError("NVRTC says", "spec", ["-arch"], "log", "")])
@one_of_each
def test_an_error_names_the_layer(name, error, monkeypatch):
    model, calls = built(name), []
    operator = getattr(hf_layers, "native_gdn" if name.startswith("qwen") else "native_mamba2")
    ours, raised = getattr(operator, OPERATORS[name]), copy.copy(error)

    def fails_the_second_time(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise raised
        return ours(*args, **kwargs)

    monkeypatch.setattr(operator, OPERATORS[name], fails_the_second_time)
    words = rf"^{label(name)}, in {LAYERS[name].name} of layer [1-9]: "
    with hf.patch(model, fuse=True) as patch, pytest.raises(type(error), match=words):
        generate(model, 2)
    assert patch.calls()[label(name)] == hf.Calls(1, 0), "the original does not mend it"


@pytest.mark.parametrize("names", [("mamba2", "qwen3_5"), ("mamba2", "mamba2")], ids=["two-kinds", "one-kind"])
def test_two_threads(names):
    models = [built(name) for name in names]
    want = [generate(model, TOKENS) for model in models]
    got, start = [None, None], threading.Barrier(2)

    def run(i):
        start.wait()
        got[i] = generate(models[i], TOKENS)

    with hf.patch(models, fuse=True):
        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    for a, b in zip(got, want, strict=True):
        same(a, b)


# Warming.


@every_kind
def test_warm_asks_for_the_kernels_of_every_call_at_every_batch_size(name, monkeypatch):
    model, asked = built(name), []

    def warm(function, *args, batches=(), **kwargs):
        asked.append((function.__name__, args[0].shape[0], tuple(batches)))
        return 0

    monkeypatch.setattr(api, "warm", warm)
    assert hf.warm(model, batches=[1, 64, 8], fuse=True) == 0
    functions, sizes = ("causal_conv1d", OPERATORS[name]), ((1, (1, 8, 64)), (2, (8, 64)))
    assert Counter(asked) == {(f, n, batches): len(mixers(model)) for f in functions for n, batches in sizes}


def test_every_kind_is_known_to_patch_and_has_a_tiny_model():
    assert set(LAYERS) <= set(hf.MODELS) & set(TINY)
