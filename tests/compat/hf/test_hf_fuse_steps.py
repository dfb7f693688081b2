"""Fused layers of transformers' models step by step: their cache, compiled, with other patches, failing, in threads, warmed."""

from __future__ import annotations

import copy
import gc
import threading
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import (
    INDEXED,
    LAYERS,
    MODELS,
    TINY,
    DecodeStep,
    assert_close,
    assert_same_generation,
    built,
    change_rates,
    convolutions,
    fused_calls,
    fused_label,
    fused_operator,
    fused_prompt_calls,
    gated_norms,
    generate,
    last_logits,
    mixer_class,
    mixers,
    norms_of_a_pass,
    of_prompts,
    prompt_calls,
)
from hf_cases import nothing_stays_patched as nothing_stays_patched
from hf_cases import the_originals_are_back as the_originals_are_back
from hf_models import compiled_nodes
from selection import costly, kept
from transformers import CompileConfig

from ssmgen.calls import api
from ssmgen.compat import hf
from ssmgen.compat.hf import layers as hf_layers
from ssmgen.errors import CaptureError, CompileError

TOKENS = 6
every_kind = pytest.mark.parametrize("name", LAYERS)
one_of_each = pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])


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
    assert patch.calls() == fused_calls(name, model, TOKENS - 1)


@one_of_each
def test_a_cache_goes_on_at_another_batch_size_and_beside_its_copy(name):
    model = built(name)

    def logits():
        step = DecodeStep(model)
        found = [step(step.cache)]
        copied = copy.deepcopy(step.cache)
        found += [step(step.cache), step(copied), step(copied)]
        step.cache.reorder_cache(rows := torch.tensor([0, 0, 1, 1]))
        step.token = step.token[rows]
        found.append(step(step.cache))
        step.cache.reorder_cache(torch.tensor([2]))
        step.token = step.token[2:3]
        return [*found, step(step.cache), step(step.cache)]

    with torch.no_grad():
        want = logits()
        with hf.patch(model, fuse=True) as patch:
            got = logits()
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
    assert patch.calls()[fused_label(name)] == hf.Calls((1 + len(want)) * convolutions(model), 0)


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


@one_of_each
def test_steps_in_inference_mode_and_out_of_it(name):
    """Data kept from a step in that mode serves a step out of it, and the other way round."""
    model = built(name)

    def logits():
        with torch.no_grad():
            step = DecodeStep(model)
        found = []
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                found.append(step(step.cache))
        return found

    with torch.no_grad():
        other = DecodeStep(model)
        want = [other(other.cache) for _ in range(3)]
    with hf.patch(model, fuse=True) as patch:
        got = logits()
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
    assert patch.calls()[fused_label(name)] == hf.Calls((1 + 3) * convolutions(model), 0)


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


@pytest.mark.matrix
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


# An indexer's own step is not a single graph. The others take seconds each.
@costly(2)
@pytest.mark.parametrize(
    "name", kept([n for n in LAYERS if n not in INDEXED], {"mamba2", "falcon_h1", "qwen3_next", "qwen3_5"}.__contains__)
)
def test_a_decode_step_compiles_into_one_graph(name):
    model = built(name)
    with hf.patch(model, fuse=True) as patch, torch.no_grad():
        step = DecodeStep(model)
        want = step(copy.deepcopy(step.cache))
        counted = patch.calls()
        got, targets = compiled_nodes(step, copy.deepcopy(step.cache))
    assert_close(got, want)
    node = "mamba2_layer" if fused_operator(name)[1] == "mamba2_layer" else "delta_layer"  # which torch knows by its kernels' name
    assert targets == {node: len(mixers(model))}
    assert patch.calls() == counted


def test_a_compiled_step_follows_its_weights():
    model = built("mamba2")
    with hf.patch(model, fuse=True), torch.no_grad():
        step = DecodeStep(model)
        compiled = torch.compile(step, backend="eager", fullgraph=True)
        torch._dynamo.reset()
        compiled(copy.deepcopy(step.cache))
        change_rates(model, "in place")
        assert_close(compiled(copy.deepcopy(step.cache)), step(copy.deepcopy(step.cache)))


@costly(1)
@one_of_each
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
    assert patch.calls() == fused_prompt_calls(name, model), "the steps were compiled: not counted"
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_dtype_that_layers_do_not_have_is_the_originals_in_a_compiled_step_too():
    model = built("mamba2").double()
    with torch.no_grad():
        step = DecodeStep(model)
        want = step(copy.deepcopy(step.cache))
        with hf.patch(model, fuse=True):
            got, targets = compiled_nodes(step, copy.deepcopy(step.cache))
    assert_close(got, want)
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
    assert whole.calls() == again.calls() == fused_calls("mamba2", model, 1)
    assert not plain.calls()
    whole.undo()
    assert mixer_class("mamba2").forward is not original
    again.undo()
    assert mixer_class("mamba2").forward is original
    generate(model, 2)
    assert plain.calls().items() > prompt_calls("mamba2", model).items()
    assert plain.calls()["mamba2.mamba2_selective_state_update"] == hf.Calls(3, 0)
    plain.undo()


def test_a_forward_with_other_parameters_is_left_alone(monkeypatch):
    def forward(self, hidden_states, cache=None):
        return hidden_states

    monkeypatch.setattr(mixer_class("mamba2"), "forward", forward)
    with pytest.warns(RuntimeWarning, match=r"Mamba2Mixer: its forward takes self, hidden_states, cache, not"):
        patch = hf.patch("mamba2", fuse=True)
    with patch:
        assert mixer_class("mamba2").forward is forward and fused_label("mamba2") not in patch.replaced
    monkeypatch.undo()


@pytest.mark.parametrize("error", [CaptureError("spec", "sm_90a", "operator"), CompileError("NVRTC says", "spec", ["-arch"], "log", "")])
@one_of_each
def test_an_error_names_the_layer(name, error, monkeypatch):
    model, calls = built(name), []
    module, operator = fused_operator(name)
    ours, raised = getattr(module, operator), copy.copy(error)

    def fails_the_second_time(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise raised
        return ours(*args, **kwargs)

    monkeypatch.setattr(module, operator, fails_the_second_time)
    words = rf"^{fused_label(name)}, in {LAYERS[name]} of layer [1-9]: "
    with hf.patch(model, fuse=True) as patch, pytest.raises(type(error), match=words):
        generate(model, 2)
    assert patch.calls()[fused_label(name)] == hf.Calls(convolutions(model) + 1, 0), "the original does not mend it"


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
        assert_same_generation(a, b)


# Warming.


@every_kind
def test_warm_asks_for_the_kernels_of_every_call_at_every_batch_size(name, monkeypatch):
    model, asked = built(name), []

    def warm(function, x, *args, batches=(), **kwargs):
        asked.append((function.__name__, x.numel() // (kwargs.get("group_size") or x.shape[-1]), list(batches)))
        return 0

    monkeypatch.setattr(api, "warm", warm)
    assert hf.warm(model, batches=[1, 64, 8], fuse=True) == 0
    of_prompt, step = of_prompts(name).values(), fused_operator(name)[1]
    between = 2 * sum(norms_of_a_pass(model).values())  # of a prompt and of a step
    calls = dict.fromkeys([*of_prompt, step], len(mixers(model))) | {"gated_rms_norm": len(gated_norms(model)), "rms_norm": between}
    found, expected = Counter(function for function, _, _ in asked), {function: 2 * count for function, count in calls.items() if count}
    if name in INDEXED:
        assert found.pop("rms_norm") > expected.pop("rms_norm")  # the indexer's, too, which see more blocks as a prompt grows
    assert found == expected
    for function, groups, sizes in asked:
        assert len(sizes) in (2, 3) and min(sizes) > 0 and sizes == sorted(set(sizes)), function
        if function not in of_prompt:  # its sizes follow the layer's sequences and the norms' groups
            assert sizes in ([groups, groups * 8, groups * 64], [groups * 4, groups * 32]), function


def test_every_kind_is_known_to_patch_and_has_a_tiny_model():
    assert set(LAYERS) <= set(MODELS) & set(TINY)
