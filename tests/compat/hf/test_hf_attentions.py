"""Attention layers of accelerated models: decode steps are one launch of decode_attention, and have the model's own tokens."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import built, in_dtype, modeling
from hf_cases import nothing_stays_patched as nothing_stays_patched
from selection import costly

import ssmgen
from ssmgen.compat.hf import attentions
from ssmgen.compat.hf import generate as hf_generate
from ssmgen.compat.hf.attentions import Attentions, parts_of

IDS = torch.arange(3, 13).view(2, 5)
# {model: parts of its attention layers}
SERVED = {
    "falcon_h1": {"rotated"},
    "nemotron_h": set(),
    "qwen3_5": {"norms", "of_heads", "gated", "rotated"},
    "olmo_hybrid": {"norms", "rotated"},
    "zamba2": set(),
    "lfm2": {"norms", "of_heads", "rotated"},
}
OTHERS = ["qwen3_next", "bamba", "granitemoehybrid", "jamba", "qwen3_5_moe", "zamba"]


def own_tokens(model, count=8):
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=count, do_sample=False, eos_token_id=None)


@pytest.fixture
def calls(monkeypatch):
    """Calls of decode_attention."""
    seen, plain = [], attentions.decode_attention
    monkeypatch.setattr(attentions, "decode_attention", lambda *args, **kwargs: seen.append(kwargs) or plain(*args, **kwargs))
    return seen


@pytest.mark.parametrize("name", [*SERVED, *(pytest.param(name, marks=costly(2)) for name in OTHERS)])
def test_tokens_are_the_models(name, calls):
    model = built(name)
    want = own_tokens(model)
    with ssmgen.accelerate(model) as fast:
        calls.clear()
        assert torch.equal(fast.generate(IDS, 8, eos_token_id=[]), want)
        steps = fast._steps[2]
        assert [*steps.positions.attends.values()] == [True] * len(steps.positions.counts)
        assert len(calls) == 7 * len(steps.positions.counts)  # the first step is computed twice, and compared
        assert "take decode steps by decode_attention" in str(fast)
    assert not any({"forward", "_ssmgen_parts"} & vars(m).keys() for m in model.modules())


@pytest.mark.parametrize("name", SERVED)
def test_parts_are_recognised(name):
    model = built(name)
    (parts, *_) = [found for m in model.modules() if (found := parts_of(m)) is not None]
    given = {field for field in ("norms", "of_heads", "gated") if getattr(parts, field)}
    given |= {"rotated"} if any(parts.rotated) else set()
    assert given == SERVED[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5"])
def test_caches_of_16_bit_models_are_their_own_up_to_rounding(name, dtype):
    model = in_dtype(built(name), dtype)

    def held(fast, ours):
        if not ours:
            fast._rotary[2].undo()
        steps = hf_generate.Steps(model, 2, 16)
        with torch.no_grad():
            steps.begin(IDS, None)
            for token in range(3):
                steps.token.fill_(token + 7)
                steps.step()
        return [t[:, :, :8].float() for layer in steps.cache.layers if hasattr(layer, "max_cache_len") for t in (layer.keys, layer.values)]

    with ssmgen.accelerate(model) as fast:
        pairs = [*zip(held(fast, True), held(fast, False), strict=True)]
    assert pairs and all((a - b).norm() <= 0.03 * b.norm() for a, b in pairs)


def changed(monkeypatch, model, change):
    """The attention of a model returns something else."""
    kind = next(type(m) for m in model.modules() if parts_of(m) is not None)
    plain = kind.forward

    def forward(self, hidden_states, *args, **kwargs):
        return change(self, plain, hidden_states, args, kwargs)

    forward.__wrapped__ = plain  # as a decorator of transformers
    monkeypatch.setattr(kind, "forward", forward)


def test_a_layer_whose_first_step_differs_stays_the_models(monkeypatch, calls):
    model = built("nemotron_h")

    def scaled(self, plain, hidden_states, args, kwargs):
        out, weights = plain(self, hidden_states, *args, **kwargs)
        return out * 1.01, weights

    changed(monkeypatch, model, scaled)
    want = own_tokens(model)
    with ssmgen.accelerate(model) as fast:
        assert any("1 attention layers stay transformers': its results differ" in words for words in fast.left), str(fast)
        calls.clear()
        assert torch.equal(fast.generate(IDS, 8, eos_token_id=[]), want)
        assert len(calls) == 1 and "take decode steps by decode_attention" not in str(fast)


def test_a_layer_whose_mask_hides_a_key_stays_the_models(monkeypatch):
    model = built("nemotron_h")

    def hidden(self, plain, hidden_states, args, kwargs):
        if kwargs.get("attention_mask") is not None:
            kwargs = kwargs | {"attention_mask": kwargs["attention_mask"].clone()}
            kwargs["attention_mask"][..., 1] = False if kwargs["attention_mask"].dtype == torch.bool else -torch.inf
        return plain(self, hidden_states, *args, **kwargs)

    changed(monkeypatch, model, hidden)
    with ssmgen.accelerate(model) as fast:
        fast.generate(IDS, 4, eos_token_id=[])
        assert [*fast._steps[2].positions.attends.values()] == [False]


def test_a_factor_of_k_is_kept():
    model = built("falcon_h1", key_multiplier=0.6)
    assert {found.key_scale for m in model.modules() if (found := parts_of(m)) is not None} == {0.6}
    want = own_tokens(model)
    with ssmgen.accelerate(model) as fast:
        assert torch.equal(fast.generate(IDS, 8, eos_token_id=[]), want) and all(fast._steps[2].positions.attends.values())


def test_no_mask_is_computed_where_no_layer_needs_it():
    with ssmgen.accelerate(built("falcon_h1")) as fast, torch.no_grad():
        steps = hf_generate.Steps(fast.model, 2, 16)
        steps.begin(IDS, None)
        filled = []
        for _ in range(3):
            steps.step()
            filled.append(steps.positions._filled)
        assert filled == [True, False, False]
        layer = next(layer for layer in steps.cache.layers if id(layer) in steps.positions.counts)
        with steps.positions.step():
            layer.update(*(torch.zeros_like(layer.keys[:, :, :1]) for _ in range(2)))
            assert steps.positions._filled, "attention that is not ours reads the mask"


def test_other_attention_is_left_alone():
    """Windows, other names in the code, latent attention, parameters of the layer's own, adapters."""
    for name, kind in (("kimi_linear", "MultiHeadLatentAttention"), ("bailing_hybrid", "Attention")):
        model = built(name)
        assert not any(parts_of(m) for m in model.modules()), (name, kind)
    model = built("falcon_h1")
    layer = next(m for m in model.modules() if parts_of(m) is not None)
    assert parts_of(layer.q_proj) is None
    layer.sinks = torch.nn.Parameter(torch.zeros(4))
    assert parts_of(layer) is None
    del layer.sinks
    layer.extra = torch.nn.Linear(8, 8)
    assert parts_of(layer) is None
    del layer.extra
    assert parts_of(layer) is not None
    modeling("qwen3_5")
    from transformers.models.ministral.modeling_ministral import MinistralAttention

    code = attentions.plain(MinistralAttention.forward).__code__.co_names
    assert "sliding_window" in code and "sliding_window" not in attentions.KNOWN


def test_calls_outside_of_steps_are_the_models(calls):
    model = built("qwen3_5")
    with torch.no_grad():
        want = model(IDS).logits
        with ssmgen.accelerate(model) as fast:
            calls.clear()
            assert torch.allclose(fast(IDS).logits, want, rtol=1e-4, atol=1e-5)
            padded = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
            fast.generate(IDS, 3, attention_mask=padded, eos_token_id=[])
            assert not calls


def test_undo_puts_the_forward_back():
    model = built("qwen3_5")
    found = Attentions(model)
    (layer,) = found.modules
    assert "forward" in vars(layer) and Attentions(model).modules == []
    found.undo(), found.undo()
    assert not {"forward", "_ssmgen_parts"} & vars(layer).keys() and parts_of(layer) is not None
