"""Small models of Mamba-3 with patched layers generate the tokens of their float64 twins, whose layers run without caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mamba3_models import MODELS, exactly, generated, made, prompts
from mamba3_stand_ins import OfFla, OfMambaSsm, module_of
from selection import costly

from ssmgen.compat import fla, mamba_ssm
from ssmgen.engine.accuracy import norm_error

COUNT = 8
PATCHES = {"mamba_ssm": (mamba_ssm.patch_mamba3, OfMambaSsm), "fla": (fla.patch_mamba3, OfFla)}


@contextmanager
def patched(name: str, A_form: str | None = None) -> Iterator[Any]:
    """A patched class of layers."""
    patch, of = PATCHES[name]
    module = module_of("peer", of)
    with patch(A_form, module=module), torch.inference_mode():
        yield module.Mamba3


@costly(4)
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("name", PATCHES)
def test_tokens_are_those_of_float64(name, options):
    prompt = prompts()
    with patched(name) as layer:
        model, exact = made(layer, **options)
        tokens, logits = generated(model, prompt, COUNT)
        want, exact_logits = exactly(exact, torch.cat([prompt, tokens], 1), COUNT)
        assert torch.equal(tokens, want) and norm_error(logits, exact_logits) < 1e-5
        again, logits = generated(model, prompt, COUNT, (3, 1, 2))
        assert torch.equal(again, want) and norm_error(logits, exact_logits) < 1e-5
    assert len({*want.flatten().tolist()}) > 3  # no single word again and again


def test_another_form_of_a_gives_other_logits():
    """So that the agreement above means something."""
    with patched("mamba_ssm", "softplus") as layer:
        model, exact = made(layer)
        tokens, logits = generated(model, prompts(), 4)
        assert norm_error(logits, exactly(exact, torch.cat([prompts(), tokens], 1), 4)[1]) > 1e-2
