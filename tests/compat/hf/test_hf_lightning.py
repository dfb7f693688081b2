"""MiniMax's models of transformers with ssmgen's Lightning attention: the tokens, logits and states that their own forward gives."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import assert_close, cache_of, generate, modeling, takes_cache, undo_leaks
from hf_cases import minimax as tiny
from hf_cases import nothing_stays_patched as nothing_stays_patched

import ssmgen
from ssmgen.calls import api
from ssmgen.compat import hf
from ssmgen.compat.hf.functions import recording
from ssmgen.errors import PatchError

LABEL, LAYERS, TOKENS = "minimax.MiniMaxLightningAttention", 2, 6


@pytest.fixture(autouse=True)
def the_original_is_back(nothing_stays_patched):
    before = vars(modeling("minimax").MiniMaxLightningAttention)["forward"]
    yield
    assert not undo_leaks() and vars(modeling("minimax").MiniMaxLightningAttention)["forward"] is before


def states_of(cache):
    return [state for state in cache.linear_cache if isinstance(state, torch.Tensor)]


def run(model, length, cache=None, **how):
    ids = torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        return model(input_ids=ids, **takes_cache(model, cache), use_cache=True, **how)


def assert_same(got, want):
    assert_close(got.logits, want.logits)
    ours, theirs = states_of(cache_of(got)), states_of(cache_of(want))
    assert len(ours) == len(theirs) == LAYERS
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("padded", [False, True])
def test_greedy_generation_is_unchanged(padded, recwarn):
    model = tiny()
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1] if padded else [1] * 5])
    want = generate(model, TOKENS, attention_mask=mask)
    with hf.patch() as patch, recording() as calls:
        got = generate(model, TOKENS, attention_mask=mask)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip((*got.logits, *states_of(cache_of(got))), (*want.logits, *states_of(cache_of(want))), strict=True):
        assert_close(a, b)
    assert patch.calls() == {LABEL: hf.Calls(LAYERS * TOKENS, 0)}
    assert [c.function.__name__ for c in calls] == ["chunk_lightning_attn"] * LAYERS + ["lightning_attn"] * LAYERS * (TOKENS - 1)
    assert not [w for w in recwarn if w.category is RuntimeWarning]


@pytest.mark.parametrize("length", [1, 9])
def test_a_prompt_and_one_behind_it(length):
    """Runs with a new cache and with a cache that has tokens; a step then updates the state in place."""
    model = tiny()
    want = run(model, length)
    after = run(model, 7, copy.deepcopy(cache_of(want)))
    with hf.patch(model):
        got = run(model, length)
        assert_same(got, want)
        again = run(model, 7, copy.deepcopy(cache_of(got)))
        assert_same(again, after)
        held = states_of(cache_of(again))
        step = run(model, 1, cache_of(again))
    assert all(a is b for a, b in zip(states_of(cache_of(step)), held, strict=True))
    assert_same(step, run(model, 1, cache_of(after)))


def test_a_prompt_without_a_cache():
    model, ids = tiny(), torch.arange(3, 21).view(2, 9)
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        with hf.patch("minimax") as patch:
            assert_close(model(input_ids=ids, use_cache=False).logits, want)
    assert patch.calls() == {LABEL: hf.Calls(LAYERS, 0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bit_prompts_and_kernels_that_serve_them(dtype):
    """Twice as far from the same weights in f32 as transformers' own at most, and states of the same dtype."""
    model = tiny().to(dtype)
    exact, theirs = run(copy.deepcopy(model).float(), 65), run(model, 65)
    with hf.patch(model), recording() as calls:
        ours = run(model, 65)
        run(model, 1, copy.deepcopy(cache_of(ours)))

    def error(found):
        return (found.logits.double() - exact.logits.double()).norm()

    assert error(ours) <= max(2 * error(theirs), 1e-4)
    assert [s.dtype for s in states_of(cache_of(ours))] == [s.dtype for s in states_of(cache_of(theirs))] == [dtype] * LAYERS
    with torch.no_grad():
        assert all(ssmgen.supported(c.function, *c.args, arch="sm_90a", **c.kwargs) == (True, []) for c in calls)


def test_training_keeps_the_original():
    model, ids = tiny().train(), torch.arange(3, 13).view(2, 5)

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = gradients()
    with hf.patch(model) as patch, pytest.warns(RuntimeWarning, match="requires grad"):
        got = gradients()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert patch.calls() == {LABEL: hf.Calls(0, LAYERS)}


def test_a_forward_with_other_parameters_is_left_alone(monkeypatch):
    monkeypatch.setattr(modeling("minimax").MiniMaxLightningAttention, "forward", lambda self, hidden_states, cache: None)
    said = pytest.warns(RuntimeWarning, match="its forward takes self, hidden_states, cache, not self")
    with said, pytest.raises(PatchError, match="none of these"):
        hf.patch("minimax")
    monkeypatch.undo()


def test_warm_asks_for_the_kernels_of_prompts_and_steps(monkeypatch):
    asked = []
    monkeypatch.setattr(api, "warm", lambda function, *args, batches=(), **kwargs: asked.append((function.__name__, tuple(batches))) or 0)
    assert hf.warm(tiny(), batches=[1, 8]) == 0
    heads = 2  # the unit of a prompt's sizes
    assert set(asked) == {("lightning_attn", (1, 8)), ("lightning_attn", (8,))} | {
        ("chunk_lightning_attn", s) for s in ((heads, 8 * heads), (4 * heads,))
    }
