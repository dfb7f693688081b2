"""ssmgen.accelerate on a card: captured steps give the tokens of eager ones; norms between layers as the emulated kernels have them."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import TINY, built

import ssmgen
from ssmgen.compat import hf
from ssmgen.launch import runtime

pytestmark = pytest.mark.gpu

REAL = {
    "mamba2": {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 128, "n_groups": 8},
    "qwen3_next": {"hidden_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
WIDE = {"mamba2": {"hidden_size": 512, "num_heads": 64}, "nemotron_h": {"hidden_size": 512}, "qwen3_5": {"hidden_size": 512}}


@pytest.fixture(autouse=True)
def f32_is_f32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def prompts(model: torch.nn.Module) -> list[torch.Tensor]:
    ids = torch.arange(3, 13, device=model.device)
    return [ids.view(2, 5), ids[:6].view(1, 6), ids.flip(0).view(2, 5)]


@pytest.mark.parametrize(("name", "sizes"), [*((name, {}) for name in TINY), *REAL.items()], ids=[*TINY, *(f"{n}-real" for n in REAL)])
def test_captured_steps_give_the_tokens_of_the_models_own(name, sizes):
    """In f32, for two batch sizes and a second prompt on the same cache and graph."""
    model = built(name, **sizes).cuda()
    how = {"max_new_tokens": 24, "do_sample": False}
    want = [model.generate(ids, attention_mask=torch.ones_like(ids), **how) for ids in prompts(model)]
    with ssmgen.accelerate(model, batches=[1, 2]) as fast:
        got = [fast.generate(ids, 24) for ids in prompts(model)]
        captured = all(steps.graph is not None for steps in fast._steps.values())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert captured or fast.left, "or it is said why not"


@pytest.mark.parametrize(("name", "sizes"), REAL.items(), ids=REAL)
def test_a_captured_bf16_step_gives_the_tokens_of_eager_ones(name, sizes):
    model = built(name, **sizes).bfloat16().cuda()
    with ssmgen.accelerate(model, batches=[2]) as fast, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        ids = prompts(model)[0]
        got, again = fast.generate(ids, 24), fast.generate(ids, 24)
        assert fast._steps[2].graph is not None and not fast.left
        fast._steps.clear()
        loaded = runtime.loaded_count()
        steps = fast._steps_of(2, 64)
        steps.captures = False
        assert torch.equal(got, again) and torch.equal(fast.generate(ids, 24), got)
        assert runtime.loaded_count() == loaded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WIDE)
def test_norms_between_layers_round_where_the_models_do(name, dtype):
    """Hidden states after each block of a wide model's step: no farther from f32's than the model's own, except for roundings."""
    model = built(name, **WIDE[name]).cuda()
    ids = prompts(model)[0]

    def states(model):
        with torch.no_grad():
            return model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states

    exact = states(model)
    model = model.to(dtype)
    theirs = states(model)
    with hf.patch(model, fuse=True):
        states(model)
        ours = states(model)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype and (a.float() - c).norm() <= 2 * (b.float() - c).norm()
