"""Positions, masks and rotary tables of accelerated models' decode steps have the values that transformers derives in every layer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import built, in_dtype
from hf_cases import nothing_stays_patched as nothing_stays_patched
from selection import costly
from transformers import StaticCache, cache_utils

import ssmgen
from ssmgen.compat.hf import generate as hf_generate
from ssmgen.compat.hf import positions
from ssmgen.compat.hf.positions import Positions

IDS = torch.arange(3, 13).view(2, 5)
MODELS = [
    "falcon_h1",
    "nemotron_h",
    "qwen3_5",
    "kimi_linear",
    "zamba2",
    "jamba",
    "olmo_hybrid",
    "bailing_hybrid",
    "lfm2",
    "granitemoehybrid",
]


class Plain(hf_generate.Steps):
    """Steps whose positions, masks and tables are transformers' own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.cache = hf_generate._cache(self.model, self.room)
        self.own, self.positions = frozenset(vars(self.cache)), None
        if self.position is not None:
            self.position = self.position.clone()

    def begin(self, ids, mask):
        super().begin(ids, mask)
        if self.position is not None:
            self.position.fill_(ids.shape[1])

    def step(self):
        super().step()
        if self.position is not None:
            self.position.add_(1)


def kept(cache):
    """The keys, values and counts of attention layers."""
    names = ("keys", "values", "cumulative_length")
    return [getattr(layer, name) for layer in cache.layers if hasattr(layer, "max_cache_len") for name in names]


def steps_of(model, kind, count, batch=2, room=16):
    """(logits of steps after two prompts on the same cache, the cache's contents)"""
    steps, logits = kind(model, batch, room), []
    plain = type(steps)._take
    steps._take = lambda given: logits.append(given.clone()) or plain(steps, given)
    with torch.no_grad():
        for ids in (IDS[:batch], IDS[:batch, :3] + 20):
            steps.begin(ids, None)
            for _ in range(count):
                steps.step()
    return logits, kept(steps.cache), steps


@costly(4)
@pytest.mark.parametrize("name", MODELS)
def test_steps_have_the_bits_of_transformers_own_positions(name):
    model = in_dtype(built(name), torch.bfloat16)
    with ssmgen.accelerate(model) as fast:
        fast._rotary[1].undo(), fast._rotary[2].undo()  # whose sums are rounded once, not twice
        want, held, _ = steps_of(model, Plain, 4)
        got, same, steps = steps_of(model, hf_generate.Steps, 4)
        assert len(fast._rotary[0].modules) == (0 if name in ("nemotron_h", "kimi_linear", "jamba", "zamba2", "granitemoehybrid") else 1)
    assert len(got) == len(want) == 10 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert held and all(torch.equal(a, b) for a, b in zip(same, held, strict=True))
    assert steps.positions.ids.tolist() == [[7], [7]] and all(int(c) == 7 for c in steps.positions.counts.values())
    assert all("forward" not in vars(m) for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5", "nemotron_h"])
def test_masks_and_tables_are_used(name):
    with ssmgen.accelerate(built(name)) as fast:
        fast._rotary[2].undo()  # decode_attention needs no masks
        *_, steps = steps_of(fast.model, hf_generate.Steps, 2)
        masks = [mask for mask in steps.positions.masks.values() if mask is not None]
        assert masks and torch.equal(masks[0][0, 0, 0] == 0, torch.arange(16) <= 4) and masks[0].dtype == torch.float32
        assert len(steps.positions.tables) == (name != "nemotron_h") and all(t is not None for t in steps.positions.tables.values())


def test_a_model_whose_mask_or_rotary_embedding_differs_keeps_its_own(monkeypatch):
    """Both are compared with the model's own at the first step."""
    model = built("falcon_h1")
    rotary = model.model.rotary_emb
    kind = type(rotary)
    plain = kind.forward

    def shifted(self, x, position_ids):
        cos, sin = plain(self, x, position_ids)
        return cos + position_ids.numel(), sin

    with ssmgen.accelerate(model) as fast:
        fast._rotary[1].undo(), fast._rotary[2].undo()
        monkeypatch.setattr(kind, "forward", shifted)
        monkeypatch.setattr(
            type(model), "create_masks_for_generate", staticmethod(lambda **_: {"full_attention": torch.ones(2, 1, 1, 16) > 0})
        )
        want, *_ = steps_of(model, Plain, 3)
        got, _, steps = steps_of(model, hf_generate.Steps, 3)
    assert steps.positions.masks is None and [*steps.positions.tables.values()] == [None]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_frequencies_that_depend_on_the_length_are_left_alone():
    model = built("falcon_h1")
    model.model.rotary_emb.rope_type = "dynamic"
    with ssmgen.accelerate(model) as fast:
        assert not fast._rotary[0].modules


def of(layers, batch=1, room=8):
    kv = SimpleNamespace(layers=layers)
    model = torch.nn.Module()
    return Positions(model, kv, batch, room, torch.device("cpu"))


def test_a_layer_that_is_written_twice_in_a_step_keeps_both_tokens():
    """A loop over layers may use a layer of the cache again; a layer may also be left out."""
    pair = [cache_utils.StaticLayer(8), cache_utils.StaticLayer(8)]
    alone = [cache_utils.StaticLayer(8), cache_utils.StaticLayer(8)]
    made = of(pair)
    tokens = torch.randn(9, 1, 2, 1, 4)
    for layers in (pair, alone):
        for i, token in enumerate(tokens[:2]):
            layers[i].update(token, -token)
    for calls in ([0, 0, 1], [1], [0, 1]):
        with made.step() as more:
            assert more == {}
            for i in calls:
                pair[i].update(tokens[i + 2], -tokens[i + 2])
                alone[i].update(tokens[i + 2], -tokens[i + 2])
                assert int(pair[i].get_seq_length()) == int(alone[i].get_seq_length())
        for ours, own in zip(pair, alone, strict=True):
            assert torch.equal(ours.keys, own.keys) and torch.equal(ours.values, own.values)
            assert int(ours.cumulative_length) == int(own.cumulative_length)
    assert made.ids.tolist() == [[3]]


def test_several_tokens_and_calls_outside_of_a_step_are_the_layers_own():
    ours, own = cache_utils.StaticLayer(8), cache_utils.StaticLayer(8)
    made = of([ours])
    x = torch.randn(1, 2, 3, 4)
    for layer in (ours, own):
        layer.update(x, -x)
    with made.step():
        ours.update(x[:, :, :2], x[:, :, :2])
    own.update(x[:, :, :2], x[:, :, :2])
    ours.update(x[:, :, :1], x[:, :, :1]), own.update(x[:, :, :1], x[:, :, :1])
    assert torch.equal(ours.keys, own.keys) and int(ours.cumulative_length) == int(own.cumulative_length) == 6
    ours.reset(), own.reset()
    assert int(ours.get_seq_length()) == 0 and made.counts[id(ours)] is ours.cumulative_length


def test_layers_that_append_in_another_way_are_left_alone():
    class StaticLayer(cache_utils.StaticLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            keys, values = super().update(key_states, value_states)
            return keys.flip(2), values

    assert positions.appends(cache_utils.StaticLayer) and not positions.appends(StaticLayer)
    assert not of([StaticLayer(8)]).counts
    model = built("qwen3_5")
    steps = hf_generate.Steps(model, 1, 8)
    static = StaticCache(config=model.config, max_cache_len=8)
    assert len(steps.positions.counts) == sum(hasattr(layer, "max_cache_len") for layer in static.layers) == 1


def test_a_step_that_fails_leaves_the_counts():
    ours = cache_utils.StaticLayer(8)
    made = of([ours])
    x = torch.randn(1, 2, 1, 4)
    ours.update(x, x)
    with pytest.raises(ZeroDivisionError), made.step():
        ours.update(x, x)
        1 / 0  # noqa: B018
    assert positions._now.positions is None and int(ours.cumulative_length) == 1 and made.ids.tolist() == [[0]]


def test_masks_that_cannot_be_made_are_told(monkeypatch):
    """As with a transformers whose maker has other parameters. The model's own masks give its own tokens."""
    model = built("falcon_h1")
    with ssmgen.accelerate(model) as fast:
        fast._rotary[1].undo(), fast._rotary[2].undo()
        want, *_ = steps_of(model, Plain, 3)
        monkeypatch.setattr(type(model), "create_masks_for_generate", staticmethod(lambda config, mask: {}))
        with pytest.warns(RuntimeWarning, match="FalconH1ForCausalLM computes its own masks in every token: .*unexpected keyword"):
            got, _, steps = steps_of(model, hf_generate.Steps, 3)
    assert steps.positions.masks is None and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
