"""Patched models run long, together and in threads, fail with words, and leave no objects or patches."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from selection import costly

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import DecodeStep, assert_same, built, generate, last_logits, snapshot, states_of
from hf_cases import nothing_stays_patched as nothing_stays_patched

from ssmgen.compat import hf
from ssmgen.errors import CaptureError, CompileError, LaunchError, LoadError, NotBuiltError

ONE_OF_EACH = ("mamba", "mamba2", "qwen3_5", "kimi_linear", "lfm2")


@costly(1)
@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
def test_long_generations_keep_no_objects(name):
    """The limit is the memory of the interpreter and of torch themselves, which does not grow with the steps."""
    model = built(name)
    with hf.patch(model) as patch, torch.no_grad():
        step = DecodeStep(model)
        counts = []
        for steps in (5, 10, 40):
            last_logits(step, step.cache, steps)
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert any(c.ssmgen >= 55 for c in patch.calls().values())
    assert counts[2] - counts[1] < 30, counts  # one object kept per layer and step would be 80 or more


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_after_undo_a_model_computes_the_same_bits_as_before(name):
    model, before = built(name), snapshot()
    parameters = {n: p.clone() for n, p in model.state_dict().items()}
    want = generate(model, 4)
    with hf.patch(model):
        generate(model, 4)
    got = generate(model, 4)
    assert_same(snapshot(), before)
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip((*got.logits, *states_of(got)), (*want.logits, *states_of(want)), strict=True))
    assert all(torch.equal(p, parameters[n]) for n, p in model.state_dict().items())


# Several models.

PAIRS = {
    "two-kinds": (("mamba2", {}), ("qwen3_5", {})),
    "one-kind": (("mamba2", {}), ("mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 32})),
    "one-model": (("qwen3_5", {}), ("qwen3_5", {})),
}
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def alone(model, steps=4):
    """Logits of every step of the patched model when nothing else runs."""
    with hf.patch(model), torch.no_grad():
        step = DecodeStep(model)
        return [step(step.cache) for _ in range(steps)]


@pairs
def test_steps_of_two_models_in_turn(pair):
    models = [built(name, **changes) for name, changes in pair]
    want = [alone(m) for m in models]
    with hf.patch(models), torch.no_grad():
        steps = [DecodeStep(m) for m in models]
        got = [[], []]
        for _ in want[0]:
            for i, step in enumerate(steps):
                got[i].append(step(step.cache))
    assert all(torch.equal(a, b) for g, w in zip(got, want, strict=True) for a, b in zip(g, w, strict=True))
    for model, logits in zip(models, want, strict=True):
        unpatched = DecodeStep(model)
        with torch.no_grad():
            theirs = [unpatched(unpatched.cache) for _ in logits]
        assert all((a - b).abs().max() <= 1e-4 * b.abs().max() for a, b in zip(logits, theirs, strict=True))


@pairs
def test_two_models_in_two_threads(pair):
    models = [built(name, **changes) for name, changes in pair]
    want = [alone(m, 8) for m in models]
    got, start = [[], []], threading.Barrier(2)

    def run(i):
        with torch.no_grad():
            step = DecodeStep(models[i])
            start.wait()
            for _ in want[i]:
                got[i].append(step(step.cache))

    with hf.patch(models):
        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert all(torch.equal(a, b) for g, w in zip(got, want, strict=True) for a, b in zip(g, w, strict=True))


def test_models_are_patched_and_restored_while_others_generate():
    """A patch of one kind never reaches into a generation of another, and a function is always one of the two."""
    model, other, stop = built("mamba2"), built("lfm2"), threading.Event()
    want = generate(model, 4).sequences

    def patch_and_undo():
        while not stop.is_set():
            with hf.patch(["mamba2", "lfm2"]), hf.patch(other):
                pass

    before, thread = snapshot(), threading.Thread(target=patch_and_undo)
    thread.start()
    try:
        assert all(torch.equal(generate(model, 4).sequences, want) for _ in range(5))
    finally:
        stop.set()
        thread.join()
    assert_same(snapshot(), before)


# Errors.

ERRORS = {
    CaptureError: ("spec", "sm_90a", "operator"),
    CompileError: ("NVRTC rejected the source", "spec", ["-arch=sm_90a"], "log", ""),
    LoadError: ("spec", "sm_90a", "CUDA_ERROR_OUT_OF_MEMORY"),
    LaunchError: ("spec", "CUDA_ERROR_LAUNCH_FAILED", 1, 32, "values"),
    NotBuiltError: ("spec", "sm_90a"),
}
CALLS = {
    "mamba2": ("selective_state_update.call.selective_state_update", "Mamba2Mixer"),
    "qwen3_5": ("linear_attention.call.gated_delta_rule", "Qwen3_5GatedDeltaNet"),
    "lfm2": ("causal_conv1d_update.call.causal_conv1d_update", "Lfm2ShortConv"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_a_later_layer_names_that_layer(name, error, monkeypatch):
    """The message names it, with the error's class and words. The original does not repeat the failed call."""
    place, layer = CALLS[name]
    ours, calls = f"ssmgen.families.{place}", []
    module, _, attribute = ours.rpartition(".")
    function = getattr(__import__(module, fromlist=["_"]), attribute)

    def fails_the_second_time(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise error(*ERRORS[error])
        return function(*args, **kwargs)

    model = built(name)
    with hf.patch(model) as patch:
        monkeypatch.setattr(ours, fails_the_second_time)
        with pytest.raises(error, match=rf"^{name}\.\w+, in {layer} of layer [1-9]\d*: ") as raised:
            generate(model, 2)
    assert str(error(*ERRORS[error])) in str(raised.value)
    assert not any(c.original for c in patch.calls().values())
