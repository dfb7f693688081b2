"""ssmgen.accelerate on a CPU: the tokens of transformers' own generate, and what could not be done said."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import built, minimax
from hf_cases import nothing_stays_patched as nothing_stays_patched

import ssmgen
from ssmgen.compat import hf, hf_generate
from ssmgen.errors import ArgumentError, PatchError

IDS = torch.arange(3, 13).view(2, 5)


def of_transformers(model, ids, count, **how):
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": count, "do_sample": False, **how})


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_it_generates_what_the_model_does(name, monkeypatch):
    """Also from the second prompt on, on the same cache, and where that needs a longer one."""
    monkeypatch.setattr(hf_generate, "ROOM", 8)
    model = built(name)
    prompts = [(IDS, 3), (IDS[:, :3] + 20, 5), (IDS, 8)]
    want = [of_transformers(model, ids, count) for ids, count in prompts]
    with ssmgen.accelerate(model) as fast:
        got = [fast.generate(ids, count) for ids, count in prompts]
        calls = fast.patch.calls()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert calls and not any(c.original for c in calls.values())


def test_a_longer_prompt_behind_a_shorter_one_on_the_same_cache():
    """Qwen4 keeps the positions of all tokens beside the cache, or in it: a prompt has those of its own tokens."""
    model = built("qwen4_exp")
    prompts = [(IDS, 2), (IDS, 24)]
    want = [of_transformers(model, ids, count) for ids, count in prompts]
    with ssmgen.accelerate(model) as fast:
        got = [fast.generate(ids, count) for ids, count in prompts]
        positions = [*_found(fast._steps[2].cache, "position_ids")]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert positions and all(p.shape[-1] == 5 + 23 for p in positions)


def _found(cache, word):
    return (v for held in (cache, *cache.layers) for name, v in vars(held).items() if word in name and isinstance(v, torch.Tensor))


def test_a_step_that_replaces_what_the_cache_holds_is_not_captured(monkeypatch):
    """It would be one that nothing has computed; and the host would count on from it where the capture fails."""
    tried = []
    monkeypatch.setattr(hf_generate.Steps, "_capture", lambda steps: tried.append(steps.room) or "tried")
    for name in ("mamba2", "qwen3_next"):
        with ssmgen.accelerate(built(name)) as fast:
            fast._steps_of(2, 64).captures = True
            with pytest.warns(RuntimeWarning, match="not captured: tried"):
                fast.generate(IDS, 4)
        assert tried.pop() and not tried
    model = built("qwen4_exp")
    want = of_transformers(model, IDS, 24)
    with ssmgen.accelerate(model) as fast:
        fast._steps_of(2, 64).captures = True
        with pytest.warns(RuntimeWarning, match="steps of 2 sequences are not captured: each makes a new .*position_ids of the cache"):
            got = fast.generate(IDS, 24)
    assert not tried and torch.equal(got, want) and "position_ids" in fast.left[-1]


def test_padded_prompts_give_the_tokens_of_transformers():
    for name in ("mamba2", "qwen3_next"):  # without attention, and with it
        model, mask = built(name), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        want = of_transformers(model, IDS, 6, attention_mask=mask)
        with ssmgen.accelerate(model) as fast:
            assert torch.equal(fast.generate(IDS, 6, attention_mask=mask), want)


@pytest.mark.parametrize("ends", ["one row", "both rows", "at once"])
def test_sequences_end_where_those_of_transformers_do(ends):
    model = built("mamba2")
    model.generation_config.eos_token_id = None
    free = of_transformers(model, IDS, 20)[:, 5:]
    tokens = {"one row": [int(free[0, 7])], "both rows": [int(free[0, 7]), int(free[1, 3])], "at once": [int(free[0, 0]), int(free[1, 0])]}
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = tokens[ends], 0
    want = of_transformers(model, IDS, 20)
    with ssmgen.accelerate(model) as fast:
        assert torch.equal(fast.generate(IDS, 20), want)


def test_what_was_done_and_what_was_not_is_told():
    with ssmgen.accelerate(built("mamba2")) as fast:
        text = str(fast)
    assert text.startswith("Mamba2ForCausalLM on cpu, float32\n  + 4 functions and the forwards of 4 classes are ssmgen's: mamba2.causal")
    assert "kernels are not loaded, and steps are not captured: the model is on cpu, where the reference computes" in fast.left[0]
    with ssmgen.accelerate(built("jamba")) as fast:
        assert any("no layer of this kind is fused" in words for words in fast.left)


def test_a_model_that_does_not_run_on_a_static_cache_generates_by_itself():
    model = minimax()
    want = of_transformers(model, IDS, 4)
    with ssmgen.accelerate(model) as fast:
        assert any("generate is model.generate: it does not run on transformers' StaticCache" in words for words in fast.left)
        assert torch.equal(fast.generate(IDS, 4), want)


def test_everything_wrong_is_said_at_once():
    with ssmgen.accelerate(built("mamba2")) as fast:
        with pytest.raises(ArgumentError) as e:
            fast.generate(IDS[0].float(), 0, attention_mask=torch.ones(1, 1))
        for words in ("input_ids is float32 [5], not int32 or int64", "max_new_tokens is 0, not 1 or more", "attention_mask is [1, 1]"):
            assert words in str(e.value)
    with pytest.raises(PatchError, match="has been undone"):
        fast.generate(IDS, 2)
    fast.undo()


def test_nothing_stays_replaced_where_it_fails(monkeypatch):
    with pytest.raises(PatchError, match="no layer of a model that is known"):
        ssmgen.accelerate(torch.nn.Linear(2, 2))
    monkeypatch.setattr(hf_generate, "_replaced", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ssmgen.accelerate(built("mamba2"))
    assert not hf._active


def test_naming_it_imports_no_transformers():
    program = "import sys, ssmgen\nassert 'torch' not in sys.modules\nssmgen.accelerate\nassert 'transformers' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
