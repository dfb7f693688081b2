"""Mamba-3's layers on a card: mamba3_layer's views, patched layers and small models against float64, and captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mamba3_models import MODELS, exactly, generated, made, prompts
from mamba3_stand_ins import OfFla, OfMambaSsm, module_of
from test_mamba3_layer import pair
from torch import Tensor

import ssmgen
from ssmgen.compat import fla, mamba_ssm
from ssmgen.engine.accuracy import norm_error
from ssmgen.families.mamba3_state_update.operands import POOLS

pytestmark = pytest.mark.gpu
COUNT = 8
PATCHES = {"mamba_ssm": (mamba_ssm.patch_mamba3, OfMambaSsm), "fla": (fla.patch_mamba3, OfFla)}
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
every_patch = pytest.mark.parametrize("name", PATCHES)


def on_card(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments on the card, with their strides."""

    def moved(t: Tensor) -> Tensor:
        room = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device="cuda")
        return room.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(t)

    return {name: moved(t) if isinstance(t, Tensor) else t for name, t in given.items()}


@pytest.mark.parametrize("gap", [0, 4, 5])
@pytest.mark.parametrize("R", [1, 2])
@pytest.mark.parametrize("tokens", [(), (3,)])
def test_a_layer_is_the_state_update_on_views_of_the_row(tokens, R, gap):
    """Bit for bit, and again for repeated calls with other rows and without `out`."""
    step, ours = (on_card(given) for given in pair(*tokens, R=R, norm=True, gap=gap))
    for repeat in range(4):
        if repeat == 2:
            del ours["out"]
        ours["projected"] = on_card({"": ours["projected"] * 0.9})[""]
        parts = ssmgen.mamba3_layer.build(**ours).operands
        step |= {name: parts[name] for name in ("z", "x", "B", "C", "dt", "A", "trap", "angle")}
        y, found = ssmgen.mamba3_state_update(**step), ssmgen.mamba3_layer(**ours)
        assert torch.equal(found, y.flatten(-2)) and all(torch.equal(step[n], ours[n]) for n in POOLS), repeat


@every_patch
@every_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_models_follow_float64(name, options, dtype):
    """With the tokens of the model itself, prompts cut and whole. Prompts of f32 models are rounded to bf16, as in both packages."""
    patch, of = PATCHES[name]
    module = module_of("peer", of)
    with patch(module=module), torch.inference_mode():
        model, exact = made(module.Mamba3, dtype, **options)
        model, prompt = model.cuda(), prompts()
        tokens, logits = generated(model, prompt.cuda(), COUNT)
        want = exact(torch.cat([prompt, tokens.cpu()], 1)[:, :-1])[:, -COUNT:]
        assert norm_error(logits.cpu(), want) < 4e-2
        _, cut = generated(model, prompt.cuda(), COUNT, (3, 1, 2), tokens)
        assert norm_error(cut.cpu(), want) < 4e-2


@every_model
def test_steps_of_f32_give_the_tokens_of_float64(options):
    module = module_of("peer", OfMambaSsm)
    with mamba_ssm.patch_mamba3(module=module), torch.inference_mode():
        model, exact = made(module.Mamba3, **options)
        model, prompt, cache = model.cuda(), prompts(), model.cache()
        for i, layer in enumerate(model.layers):
            cache.key_value_memory_dict[i] = layer.fresh(len(prompt))
        sequence = prompt.cuda()
        for position in range(prompt.shape[1] + COUNT - 1):
            cache.seqlen_offset = 1  # also the first token is a step, from zero states
            last = model(sequence[:, position : position + 1], cache)[:, -1]
            if position >= prompt.shape[1] - 1:
                sequence = torch.cat([sequence, last.argmax(-1, keepdim=True)], 1)
        assert torch.equal(sequence[:, -COUNT:].cpu(), exactly(exact, sequence.cpu(), COUNT)[0])


@every_patch
def test_steps_can_be_captured(name):
    """As mamba-ssm's generation with CUDA graphs does, after a step that loads the kernel."""
    patch, of = PATCHES[name]
    module = module_of("peer", of)
    with patch(module=module), torch.inference_mode():
        model, _ = made(module.Mamba3, torch.bfloat16, rank=2)
        layer = model.layers[0].cuda()
        rows = torch.randn(3, 2, 1, 32, device="cuda").bfloat16()
        eager, captured = layer.fresh(2), layer.fresh(2)

        def step(u: Tensor, states: Any) -> Tensor:
            out = layer.step(u, *states)
            return out if isinstance(out, Tensor) else out[0]

        want = [step(u, eager) for u in rows]
        u, graph = rows[0].clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(u, captured)
        for t in captured:
            t.zero_()
        for new, expected in zip(rows, want, strict=True):
            u.copy_(new)
            graph.replay()
            assert torch.equal(out, expected)
        assert all(map(torch.equal, eager, captured))
