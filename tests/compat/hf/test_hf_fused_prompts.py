"""Prompts of whole layers of transformers' models: in pieces and with padding, each row equals the row alone."""

from __future__ import annotations

import copy
import inspect
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from hf_cases import (
    CLASSES,
    INDEXED,
    SOME,
    Prompt,
    assert_close,
    fused_label,
    fused_prompt_calls,
    mixers,
    norm_of_error,
    norms_of_a_pass,
    of_prompts,
    prompt_calls,
    prompted,
    states_of_cache,
    takes_cache,
)
from hf_cases import nothing_stays_patched as nothing_stays_patched
from selection import costly, kept

from ssmgen.compat import hf
from ssmgen.compat.hf import prompts as hf_prompts
from ssmgen.compat.hf.functions import recording
from ssmgen.errors import UnsupportedError

PADDED = ("111111111 001111111 010110111 000000011 000000000", "11111 01011 00011 00000 00111")  # rows of a prompt and of the next one
WIDTH = 4  # of every tiny model's convolution
FIRST = ("mamba", "mamba2", "qwen3_next", "kimi_linear")  # one of each kind of layer
every_kind = pytest.mark.parametrize("name", CLASSES)
MIXERS = {name: (name, {}) for name in CLASSES} | {
    "mamba2-biased": ("mamba2", {"use_bias": True}),
    "mamba-biased": ("mamba", {"use_bias": True}),
    "mamba2-limited": ("mamba2", {"time_step_limit": (0.1, 0.5)}),
    "falcon_h1-normed": ("falcon_h1", {"mamba_rms_norm": True}),
    "falcon_h1-gated": ("falcon_h1", {"mamba_rms_norm": False}),
    "qwen3_5-wide-values": ("qwen3_5", {"linear_value_head_dim": 32}),
}


class Layer:
    """A mixer with weights that differ where a new model's do not."""

    def __init__(self, name, **changes):
        self.model = prompted(name, **changes)
        self.mixer = mixers(self.model)[0]
        torch.manual_seed(1)
        for parameter in self.mixer.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.2, 1.2)
        self.projection = getattr(self.mixer, "out_proj", None) or self.mixer.o_proj

    def new_cache(self):
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def __call__(self, hidden, cache, mask=None):
        with torch.no_grad():
            return self.mixer(hidden, **takes_cache(self.mixer, cache), attention_mask=mask)


# Each row equals the row alone.


@pytest.mark.parametrize(("name", "changes"), MIXERS.values(), ids=MIXERS)
def test_a_row_is_what_it_is_by_itself_wherever_its_padding_is(name, changes):
    """A prompt and another one after it: the layer's output, its window and its state. Padded places hold the layer's output for 0.

    The rows of both have: no padding; some on the left; gaps; fewer tokens than the window, and none.
    """
    layer = Layer(name, **changes)
    masks = [torch.tensor([[int(c) for c in row] for row in rows.split()]) for rows in PADDED]
    pieces = [(torch.randn(*mask.shape, 32), mask) for mask in masks]
    cache, alone = layer.new_cache(), [layer.new_cache() for _ in range(5)]
    with hf.patch(name, fuse=True) as patch:
        for hidden, mask in pieces:
            got = layer(hidden, cache, mask)
            for row, real in enumerate(mask.bool()):
                if not real.any():
                    continue
                want = layer(hidden[row : row + 1, real], alone[row])
                assert_close(got[row : row + 1, real], want)
                for batched, single in zip(states_of_cache(cache), states_of_cache(alone[row]), strict=True):
                    assert_close(batched[row : row + 1], single)
            padding = torch.zeros(int((mask == 0).sum()), layer.projection.in_features)
            assert torch.equal(got[mask == 0], layer.projection(padding))
    assert fused_label(name) in patch.calls() and not patch.calls().keys() & prompt_calls(name, layer.model).keys()


@every_kind
def test_a_prompt_in_pieces_is_the_whole_prompt(name):
    """Longer than the convolution's window and shorter. Transformers' Mamba begins each from a state of zeros."""
    model = prompted(name)
    want = Prompt.run(model, 16)
    counts = "position_ids" in inspect.signature(model.forward).parameters  # Bamba starts again without them
    logits, how = [], {}
    with hf.patch(model, fuse=True) as patch:
        for first, end in ((0, 7), (7, 10), (10, 16)):
            how |= {"position_ids": torch.arange(first, end).expand(2, -1)} if counts else {}
            got = Prompt.run(model, 16, tokens=slice(first, end), **how)
            how |= takes_cache(model, got.cache)
            logits.append(got.logits)
    assert_close(torch.cat(logits, dim=1), want.logits)
    for ours, theirs in zip(got.states, want.states, strict=True):
        assert_close(ours, theirs)
    expected = {label: hf.Calls(3 * calls.ssmgen, 0) for label, calls in fused_prompt_calls(name, model).items()}
    assert patch.calls() == expected | (dict.fromkeys(norms_of_a_pass(model), SOME) if name in INDEXED else {})


@pytest.mark.parametrize("name", kept(CLASSES, lambda name: name in FIRST))
def test_prompts_of_mixed_lengths_generate_what_each_does(name):
    """Greedily, in f32, padded on the left."""
    model = prompted(name)
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    lengths, longest = (9, 2, 5), 9
    ids = torch.randint(3, 64, (3, longest), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    ids = torch.where(mask.bool(), ids, 0)
    rows = [(ids[i : i + 1, longest - n :], mask[i : i + 1, longest - n :]) for i, n in enumerate(lengths)]
    want = [model.generate(tokens, attention_mask=real, **how) for tokens, real in rows]
    with hf.patch(model, fuse=True):
        got = model.generate(ids, attention_mask=mask, **how)
    assert [row[longest:].tolist() for row in got] == [row[0, -4:].tolist() for row in want]


# Its calls.


@costly(5)
@every_kind
def test_a_layer_is_one_convolution_one_scan_and_one_gated_norm(name):
    model = prompted(name)
    want = Prompt.run(model, 6, use_cache=False)
    with hf.patch(model, fuse=True) as patch, recording() as calls:
        got = Prompt.run(model, 6, use_cache=False)
    assert_close(got.logits, want.logits)
    layers = patch.calls()[fused_label(name)].ssmgen
    ours = [*of_prompts(name).values(), *(["gated_rms_norm"] if any("RMSNormGated" in type(m).__name__ for m in model.modules()) else [])]
    counts = Counter(call.function.__name__ for call in calls)
    assert counts.pop("rms_norm") == sum(norms_of_a_pass(model, torch.ones(2, 6, dtype=torch.long)).values())
    assert counts == dict.fromkeys(ours, layers) and layers == len(mixers(model))


@pytest.mark.parametrize("name", kept(CLASSES, lambda name: name in FIRST))
def test_16_bit_prompts_are_no_farther_from_the_same_weights_in_f32(name):
    """The error is at most twice the model's own: that is left to chance in so few numbers."""
    model = prompted(name).bfloat16()
    exact, theirs = Prompt.run(copy.deepcopy(model).float(), 65), Prompt.run(model, 65)
    with hf.patch(model, fuse=True) as patch:
        ours = Prompt.run(model, 65)
    expected = fused_prompt_calls(name, model)
    assert patch.calls() == expected | (dict.fromkeys(norms_of_a_pass(model), SOME) if name in INDEXED else {})
    assert norm_of_error(ours, exact) <= 2 * norm_of_error(theirs, exact)
    assert [state.dtype for state in ours.states] == [state.dtype for state in theirs.states]


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_what_refuses_has_changed_nothing(name, monkeypatch):
    """Refuses a layer's last call, on a cache that has tokens: transformers' forward continues from the cache's states."""
    model = prompted(name)
    want = Prompt.run(model, 6)
    after = want.go_on(model, 5)

    def refuse(*args, **kwargs):
        raise UnsupportedError("gated_rms_norm", ["no kernel"])

    with hf.patch(model, fuse=True) as patch:
        got = Prompt.run(model, 6)
        monkeypatch.setattr(hf_prompts, "gated_rms_norm", refuse)
        before = patch.calls()
        again = got.go_on(model, 5)
    for ours, theirs in zip((again.logits, *again.states), (after.logits, *after.states), strict=True):
        assert_close(ours, theirs)
    assert patch.calls()[fused_label(name)] == before[fused_label(name)]
    assert patch.calls().items() >= prompt_calls(name, model).items()


def test_sequences_that_the_caller_has_packed_are_for_the_functions():
    layer = Layer("mamba2")
    with hf.patch("mamba2", fuse=True) as patch, torch.no_grad():
        layer.mixer(torch.randn(1, 9, 32), seq_idx=torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32))
    assert fused_label("mamba2") not in patch.calls() and patch.calls()["mamba2.mamba2_chunk_scan"] == hf.Calls(1, 0)


# Packing.


def test_packing_asks_the_host_nothing():
    """Tensors without numbers go through it, so that no number is looked at."""
    packing = hf_prompts.packing_of(torch.ones(3, 8, dtype=torch.long, device="meta"))
    tokens = torch.empty(3, 8, 16, device="meta")
    packed = packing.pack(tokens)
    assert packed.shape == (1, 24, 16) and packing.unpack(packed, 3).shape == tokens.shape
    for before in (None, torch.empty(3, 16, WIDTH, device="meta")):
        assert packing.window(packed, WIDTH, before).shape == (3, 16, WIDTH)
    told = hf_prompts.Prompt(packing, None, None, True)
    assert told.without_padding(packed) is packed


def test_a_mask_is_packed_once_and_anew_when_it_has_changed():
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    packing = hf_prompts.packing_of(mask)
    assert hf_prompts.packing_of(mask) is packing and packing.starts.tolist() == [0, 2, 5]
    assert packing.order.tolist() == [1, 2, 3, 4, 5, 0] and packing.padding.flatten().tolist() == [False] * 5 + [True]
    mask[1, 0] = 0
    assert hf_prompts.packing_of(mask).starts.tolist() == [0, 2, 4]
    with torch.inference_mode():
        made = torch.tensor([[0, 1]])
        assert hf_prompts.packing_of(made).starts.tolist() == [0, 1]
        made[0, 0] = 1
        assert hf_prompts.packing_of(made).starts.tolist() == [0, 2]
