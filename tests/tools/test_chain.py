"""The chain of decode layers that tools.chain times: its arithmetic on the CPU, and the variants of its forms."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu, softplus

from ssmgen.select import registry
from ssmgen.spec.kernel import Arch, DType, Index, Pdl
from ssmgen.variants.defaults import layer
from tools.chain import BOUND, EPS, FORMS, Chain, Form, checked
from tools.context import error

SMALL = {"hidden": 64, "heads": 8, "headdim": 16, "groups": 2}
SM90 = Arch.parse("sm_90a")


@pytest.fixture
def chain() -> Chain:
    torch.manual_seed(0)
    return Chain("cpu", 2, 2, **SMALL)


def test_forms_agree(chain):
    checked(chain, {name: chain.step(form) for name, form in FORMS.items()})


def test_a_form_that_differs_is_found(chain):
    steps = {name: chain.step(form) for name, form in FORMS.items()}

    def wrong() -> None:
        steps["late"]()
        chain.added[0, 0] += 1

    with pytest.raises(AssertionError, match="late and all first differ"):
        checked(chain, steps | {"all first": wrong})


def test_a_step_is_what_it_says(chain):
    """Against the layer's equations in float64, from empty states, where the convolution sees one input."""
    chain.step(FORMS["late"])()
    h = chain.token.double()
    for one, norm in zip(chain.layers, chain.norms, strict=True):
        normed = h * (h.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
        z, xBC, dt = (normed @ one.into.double().t()).split([one.kinds[0], sum(one.kinds[1:4]), one.heads], -1)
        mixed = silu(xBC * one.conv_weight[:, -1].double() + one.conv_bias.double())
        x, B, C = (
            t.unflatten(-1, (n, -1)) for t, n in zip(mixed.split(one.kinds[1:4], -1), (one.heads, one.groups, one.groups), strict=True)
        )
        weight = (B * C).sum(-1).repeat_interleave(one.heads // one.groups, 1) * softplus(dt + one.dt_bias.double())
        y = (x * (weight + one.D.double())[..., None]).flatten(1) * silu(z)
        y = y.unflatten(-1, (one.groups, -1))
        y = (y * (y.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()).flatten(1) * one.norm.double()
        h = h + y @ one.out.double().t()
    assert error(chain.residual.float() + chain.added.float(), h) < BOUND / 2


def test_bytes(chain):
    weights = 2 * (64 * (2 * 128 + 2 * 256 + 8) + 64 * 128)
    states = 2 * 2 * 2 * (8 * 16 * 128 + 640 * 3)
    assert chain.bytes == 2 * (weights + states)


@pytest.mark.parametrize("name", FORMS)
def test_variants_of_forms_are_legal(name):
    """On the model that is timed, of 1 to 16 rows."""
    problem = layer("nemotron-h-8b", DType.BF16, Index.NONE)
    form = FORMS[name]
    for rows in (1, 8, 16):
        chosen = registry.select("mamba2_layer", problem, rows, SM90, form.pdl)
        spec = form.changed(chosen)
        assert not spec.violations(SM90)
        pdl, norm = spec.pdl, spec.kernels[1].pdl
        assert (pdl, norm) == ((form.layer or chosen.pdl, form.layer_norm) if form.pdl else (Pdl.OFF, Pdl.OFF))


def test_without_dependent_launches_nothing_is_changed():
    spec = registry.select("mamba2_layer", layer("nemotron-h-8b", DType.BF16), 1, SM90, False)
    assert Form(pdl=False, layer=Pdl.TRIGGER_FIRST).changed(spec) is spec
