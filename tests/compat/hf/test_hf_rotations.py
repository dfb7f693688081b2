"""q and k of accelerated decode steps are turned in fewer operations, to the same values up to rounding."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import built, modeling
from hf_cases import nothing_stays_patched as nothing_stays_patched

import ssmgen
from ssmgen.compat.hf import positions, rotations
from ssmgen.compat.hf.rotations import NAME, Rotations, kinds, turned

IDS = torch.arange(3, 13).view(2, 5)


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    def one(x):
        pairs = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos[:, None] + pairs * sin[:, None]

    return one(q), one(k)


@pytest.fixture
def step(monkeypatch):
    """As within a step of accelerate."""
    monkeypatch.setattr(positions._now, "positions", object())


@pytest.mark.parametrize(("name", "expected"), [("falcon_h1", (True, False)), ("qwen3_5", (True, True)), ("lfm2", (True, False))])
def test_functions_are_recognised_by_numbers(name, expected):
    assert kinds(getattr(modeling(name), NAME)) == expected
    assert kinds(interleaved) == (False, False) and kinds(lambda q, k, cos, sin: (q, k)) == (False, False)


@pytest.mark.parametrize(("name", "width"), [("falcon_h1", 16), ("qwen3_5", 16), ("qwen3_5", 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_near_to_float64_as_transformers_own(name, width, dtype, step):
    torch.manual_seed(0)
    q, k, cos, sin = (torch.randn(shape).to(dtype) for shape in ((3, 4, 1, 16), (3, 2, 1, 16), (3, 1, width), (3, 1, width)))
    own = getattr(modeling(name), NAME)
    given = [t.clone() for t in (q, k)]
    exact = own(q.double(), k.double(), cos.double(), sin.double())
    for got, plain, want in zip(rotations.run(own)(q, k, cos, sin), own(q, k, cos, sin), exact, strict=True):
        assert got.dtype == dtype and got.shape == plain.shape
        assert (got - want).abs().max() <= (plain - want).abs().max() * 1.25 + 1e-7
    assert torch.equal(q, given[0]) and torch.equal(k, given[1]), "its arguments stay"


def test_another_cos_is_extended_again():
    x, cos = torch.randn(1, 2, 1, 8), torch.randn(2, 1, 1, 4)
    got = [turned(x, c, torch.zeros(1, 1, 4)) for c in cos]
    for a, c in zip(got, cos, strict=True):
        assert torch.equal(a, torch.cat([x[..., :4] * c, x[..., 4:]], dim=-1))


def test_other_calls_are_the_original(step):
    asked = []

    def own(q, k, cos, sin, unsqueeze_dim=1):
        asked.append(unsqueeze_dim)
        return modeling("falcon_h1").apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    ours, asked[:] = rotations.run(own), []
    q, cos = torch.randn(1, 2, 1, 8), torch.randn(1, 1, 8)
    ours(q, q, cos, cos)
    assert not asked
    ours(q, q, cos, cos, unsqueeze_dim=1), ours(q.expand(1, 2, 3, 8), q, cos, cos), ours(q, q, cos.double(), cos.double())
    assert len(asked) == 3
    positions._now.positions = None
    ours(q, q, cos, cos)
    assert len(asked) == 4


def test_the_last_model_puts_the_original_back():
    file = modeling("falcon_h1")
    own = getattr(file, NAME)
    one, other = Rotations(built("falcon_h1")), Rotations(built("falcon_h1"))
    assert getattr(file, NAME).original is own
    one.undo(), one.undo()
    assert getattr(file, NAME) is not own
    other.undo()
    assert getattr(file, NAME) is own


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5"])
def test_tokens_are_the_models(name):
    model = built(name)
    own = getattr(modeling(name), NAME)
    want = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False)
    with ssmgen.accelerate(model) as fast:
        assert torch.equal(fast.generate(IDS, 8), want)
    assert getattr(modeling(name), NAME) is own
