"""The study of state formats: its roundings and recurrences are ssmgen's, and its results support the page's sentences."""

from __future__ import annotations

import json

import pytest
import torch
from selection import costly
from torch import Tensor

import ssmgen
from ssmgen.engine.narrow_reference import narrowed, rounded_narrow
from ssmgen.engine.stochastic_reference import rounded
from tools.plots.states import DATA, values
from tools.state_accuracy import __main__ as program
from tools.state_accuracy.formats import FORMATS, Noise, bf16_with_noise, f16_with_noise, integers
from tools.state_accuracy.models import DECAYS, LAYERS_OF, Run, delta_steps, mamba2_steps

BY_NAME = {form.name: form for form in FORMATS}
NARROW = {"int16": torch.int16, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def numbers(n: int = 4096, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=g) * torch.exp2(torch.randint(-30, 8, (n,), generator=g).float())


def words(n: int) -> Tensor:
    return torch.randint(0, 2**31, (n,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)


@pytest.mark.parametrize("scale", [1.0, 2.0**-14, 2.0**-24, 2.0**-36])
def test_16_bits_with_noise_are_the_reference_s(scale):
    x, noise = numbers() * scale, words(4096)
    assert torch.equal(bf16_with_noise(x.clone(), noise), rounded(x, torch.bfloat16, noise.long()).float())
    assert torch.equal(f16_with_noise(x.clone(), noise), rounded(x, torch.float16, noise.long()).float())


@pytest.mark.parametrize("value", [3e-5, -7.3e-6, 5e-8, 2e-9])
def test_subnormal_f16_is_unbiased(value):
    found = f16_with_noise(torch.full((2**18,), value), words(2**18)).double()
    assert len(found.unique()) == 2 and (found * 2**24 == (found * 2**24).round()).all()
    assert abs(float(found.mean()) - torch.tensor(value).item()) < 5 * 0.5 * 2.0**-24 / 2**9


@pytest.mark.parametrize("name", NARROW)
def test_formats_with_scales_are_the_reference_s(name):
    x = numbers().view(8, 64, 8).clamp(-1e3, 1e3)
    stored, scale = narrowed(x, NARROW[name])
    want = stored.float() * scale[..., None]
    assert torch.allclose(BY_NAME[name].rounded(x.clone(), None), want, rtol=1e-6, atol=0)


def test_integers_with_noise_are_the_reference_s():
    x, noise = numbers().view(64, 64), words(4096).view(64, 64)
    scale = x.abs().amax(-1, keepdim=True) / 127
    want = rounded_narrow(x / scale, torch.int8, noise.long()).float() * scale
    assert torch.equal(integers(127.0, True)(x.clone(), noise), want)


def test_float8_with_noise_is_unbiased_and_representable():
    x = torch.tensor([[448.0, 3.3, -0.07, 0.0031, 1e-3, -100.1, 17.0, 2.0**-6]]).repeat(2**16, 1)
    found = BY_NAME["float8_e4m3fn, noise"].rounded(x.clone(), words(x.numel()).view(x.shape))
    assert torch.equal(found, found.to(torch.float8_e4m3fn).float())
    step = torch.exp2(x[0].abs().log2().floor().clamp(min=-6) - 3)
    assert ((found.double().mean(0) - x[0].double()).abs() <= 5 * 0.5 * step / 2**8).all()


@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_rules_are_ssmgen_s(by_channel):
    B, T, H, K, V = 2, 5, 2, 16, 8
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(B, T, H, size, generator=g, dtype=torch.float64) for size in (K, K, V))
    k, log, beta = k / 8, -torch.rand(B, T, H, K if by_channel else 1, generator=g).double(), torch.rand(B, T, H, generator=g).double()
    found = delta_steps(q, k, v, log.exp(), beta, Run(None, 0))
    state = torch.zeros(B, H, V, K)
    function = ssmgen.kda if by_channel else ssmgen.gated_delta_rule
    given = [t.float() for t in (q, k, v, log if by_channel else log[..., 0], beta)]
    assert torch.allclose(function(state, *given, scale=1.0), found.float(), rtol=1e-5, atol=1e-5)


def test_mamba2_is_ssmgen_s():
    B, T, H, P, N = 2, 5, 2, 4, 8
    g = torch.Generator().manual_seed(3)
    u, dt = torch.randn(B, T, H, P, generator=g), torch.rand(B, T, H, generator=g)
    b, c, A = torch.randn(B, T, N, generator=g), torch.randn(B, T, N, generator=g), -torch.rand(H, generator=g)
    found = mamba2_steps((u * dt[..., None]).double(), b.double(), c.double(), torch.exp(dt * A).double(), Run(None, 0))
    y = ssmgen.selective_state_update(torch.zeros(B, H, P, N), u, dt, A, b[:, :, None], c[:, :, None])
    assert torch.allclose(y.flatten(2), found.float(), rtol=1e-5, atol=1e-5)


@costly(1, 1)
@torch.no_grad()
@pytest.mark.parametrize("kind", LAYERS_OF)
def test_a_short_study(kind):
    """f32 is exact up to its own rounding; fewer bits are further away, in the order of their steps."""
    rows = program.study(24, 8, [kind])
    assert len(rows) == len(FORMATS) * len(DECAYS)
    kl = {name: [row["kl"] for row in rows if row["format"] == name] for name in BY_NAME}
    assert max(kl["float32"]) < 1e-9
    for better, worse in (("float32", "int16"), ("int16", "bfloat16"), ("bfloat16", "int8")):
        assert all(a < b for a, b in zip(kl[better], kl[worse], strict=True))


def test_noise_differs_between_roundings():
    noise, x = Noise(0), torch.zeros(64)
    assert not torch.equal(noise.like(x), noise.like(x))


def test_the_page_s_sentences_follow_from_the_data():
    rows = json.loads(DATA.read_text())["rows"]
    assert {row["model"] for row in rows} == set(LAYERS_OF) and {row["format"] for row in rows} == set(BY_NAME)

    def kl(model: str, name: str) -> list[float]:
        return [values(rows, model, name)[decay]["kl"] for decay in DECAYS]

    long = slice(2, 4)  # decays of 0.999 and 0.9999
    for nearest, factor in (("bfloat16", 15), ("float16", 8), ("int8", 1.2), ("float8_e4m3fn", 5)):
        ratios = [a / b for a, b in zip(kl("Mamba-2", nearest)[long], kl("Mamba-2", f"{nearest}, noise")[long], strict=True)]
        assert min(ratios) > factor, (nearest, ratios)
    for model in LAYERS_OF:
        assert max(kl(model, "int16")) < 0.1 * max(kl(model, "float16"))
        assert min(a / b for a, b in zip(kl(model, "int8"), kl(model, "bfloat16"), strict=True) if b < 1e-3) > 5
