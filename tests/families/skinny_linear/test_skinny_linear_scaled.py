"""skinny_linear with scales of weights of 16 and 32 bits: they multiply f32 sums once, in every form and variant."""

from __future__ import annotations

import pytest
import torch
from emulated_calls import SM80, SM90, emulate
from selection import costly
from skinny_cases import NAN, WITH_GXX, variants, wide

import ssmgen
from ssmgen.calls.operator import call_of
from ssmgen.emulator.check import trial_of
from ssmgen.families.skinny_linear.problem import SkinnyProblem
from ssmgen.families.skinny_linear.spec import FmaSpec
from ssmgen.spec.kernel import DType

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TYPES = [(BF16, F32), (BF16, BF16), (F16, F16), (F32, F32)]  # of x and weights, and of scales
IDS = ["bf16", "bf16-own", "f16-own", "f32"]


def made(dtype, weights=1, rows=5, k=528, n=40, out=None, **more):
    """A call without scales, with NaN between rows."""
    torch.manual_seed(2)
    outputs = 1 if more.get("activation") else weights
    return {
        "x": wide(16, k, dtype=dtype)[:rows],
        "weight": [wide(n, k, dtype=dtype).mul_(k**-0.5) for _ in range(weights)],
        "out": [wide(16, n, dtype=out or dtype)[:rows].fill_(NAN) for _ in range(outputs)],
        **more,
    }


def results(call, spec=None, arch=SM90):
    found = emulate(call_of(ssmgen.skinny_linear, **call), spec, arch)
    return [t.clone() for t in (found if isinstance(found, tuple) else (found,))]


@costly(6, 6)
@WITH_GXX
@pytest.mark.parametrize("arch", [SM90, SM80], ids=str)
@pytest.mark.parametrize(("dtype", "kind"), TYPES, ids=IDS)
@pytest.mark.parametrize("weights", [1, 3])
def test_a_scale_multiplies_the_f32_sum_once(dtype, kind, weights, arch):
    call = made(dtype, weights, out=F32)
    scales = [(torch.rand(40) + 0.5).to(kind) for _ in range(weights)]
    sums = results(call, arch=arch)
    want = [s * scale.float() for s, scale in zip(sums, scales, strict=True)]
    got = results(call | {"scale": scales}, arch=arch)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    bias = [torch.randn(40) for _ in range(weights)]
    added = results(call | {"scale": scales, "bias": bias}, arch=arch)
    for a, s, scale, b in zip(added, sums, scales, bias, strict=True):
        torch.testing.assert_close(a, (s.double() * scale.double() + b.double()).float(), rtol=2**-23, atol=0)
    rounded = results(made(dtype, weights) | {"scale": scales}, arch=arch)
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(rounded, want, strict=True))


@WITH_GXX
@pytest.mark.parametrize("arch", [SM90, SM80], ids=str)
@pytest.mark.parametrize(("dtype", "kind"), TYPES, ids=IDS)
def test_gate_and_up_are_scaled_before_the_activation(dtype, kind, arch):
    call = made(dtype, 2, out=F32, activation="silu_and_mul")
    scales = [torch.full((40,), 0.75).to(kind), (torch.rand(40) + 0.5).to(kind)]
    apart = {**call, "activation": None, "out": [torch.empty(5, 40) for _ in range(2)]}
    gate, up = results(apart | {"scale": scales}, arch=arch)
    (got,) = results(call | {"scale": scales}, arch=arch)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert ((got - exact).abs() <= (4 + gate.abs()) * torch.finfo(F32).eps * exact.abs()).all()


@WITH_GXX
@pytest.mark.parametrize("weights", [1, 4])
def test_variants_are_bit_equal(weights):
    call = made(BF16, weights, rows=3) | {"scale": [torch.rand(40) for _ in range(weights)]}
    found = call_of(ssmgen.skinny_linear, **call)
    problem, *_ = found.problem()
    specs = variants(problem)
    want = results(call, specs[0])
    assert len(specs) > 3 and all(all(map(torch.equal, results(call, spec), want)) for spec in specs[1:])


@WITH_GXX
def test_trials_have_scales_and_names_say_so():
    problem = SkinnyProblem(k=512, scale=DType.F32, x=DType.F32, out=DType.F32)
    spec = FmaSpec(k=512, scale=DType.F32, x=DType.F32, out=DType.F32, tile=1)
    assert not problem.faults() and "_scaled_" in spec.name and "scale" in trial_of(spec, 2, 0).named
    plain = FmaSpec(k=512, x=DType.F32, out=DType.F32, tile=1)
    assert "scaled" not in plain.name and "scale" not in trial_of(plain, 2, 0).named


def test_cpu_tensors_have_the_same_scale():
    x, weight, scale = torch.randn(2, 48), torch.randn(16, 48), torch.rand(16)
    torch.testing.assert_close(ssmgen.skinny_linear(x, weight, scale=scale), x @ weight.T * scale)
