"""skinny_linear with weights of 8 bits: exact conversions, scales in the epilogue, and the laws of all variants."""

from __future__ import annotations

import pytest
import skinny_cases as laws
import torch
from selection import costly
from skinny_cases import SM90, WITH_GXX, by_name, emulate, fields_of, narrow_operands, problem_of, served

import ssmgen
from ssmgen.families.skinny_linear.operands import SCALES, WEIGHTS
from ssmgen.families.skinny_linear.problem import SkinnyProblem
from ssmgen.families.skinny_linear.reference import skinny_linear as reference
from ssmgen.families.skinny_linear.spec import FmaSpec, SkinnySpec
from ssmgen.spec.kernel import Arch, DType, Narrow

I8, E4M3, BF16, F16, F32 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
TYPES = [(BF16, I8, F32), (BF16, E4M3, BF16), (F16, I8, F16), (F16, E4M3, F32)]
IDS = ["bf16-i8", "bf16-e4m3-own-scale", "f16-i8-own-scale", "f16-e4m3"]
OLD = [Arch.parse("sm_80"), Arch.parse("sm_89")]


@costly(4)
@WITH_GXX
@pytest.mark.parametrize(("dtype", "stored", "scale"), TYPES, ids=IDS)
@pytest.mark.parametrize("k", [2048, 1040])
def test_variants_are_bit_equal_and_within_rounding_of_float64(dtype, stored, scale, k):
    named = narrow_operands(dtype, stored, scale, k, (40, 24), bias=F32, rows=3)
    assert laws.variants_agree(named) == {SkinnySpec}


@WITH_GXX
@pytest.mark.parametrize(("dtype", "stored", "scale"), TYPES, ids=IDS)
def test_a_row_has_the_same_bits_beside_any_others(dtype, stored, scale):
    whole = narrow_operands(dtype, stored, scale, 1040, (40,), bias=None, rows=16)
    all_rows = emulate(served(problem_of(whole), 40), whole)[0]
    for rows in range(1, 16):
        few = {name: t[-rows:] if name in ("x", "out") else t for name, t in whole.items()}
        assert torch.equal(emulate(served(problem_of(few), 40), few)[0], all_rows[-rows:]), rows


@WITH_GXX
@pytest.mark.parametrize("stored", [I8, E4M3])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("arch", [SM90, *OLD], ids=str)
def test_every_number_is_converted_exactly(dtype, stored, arch):
    """Rows of x have one 1 each, so products are the weights themselves; NaN stays NaN."""
    bits = torch.arange(256).to(torch.uint8).view(16, 16)
    x = torch.zeros(16, 16, dtype=dtype)
    x.fill_diagonal_(1)
    weight = bits.where(~torch.isnan(bits.view(stored).float()), 0).view(stored)
    named = by_name(x=x, weight=weight, scale=torch.ones(16), out=torch.empty(16, 16))
    spec = served(problem_of(named), 16, arch)
    assert torch.equal(emulate(spec, named, arch)[0], weight.float().t())
    if stored is E4M3:
        named["weight"].view(torch.uint8)[3, 5] = 0xFF
        assert torch.isnan(emulate(spec, named, arch)[0][:, 3]).all()


@WITH_GXX
@pytest.mark.parametrize("stored", [I8, E4M3])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_scale_of_one_gives_the_bits_of_weights_in_the_type_of_x(dtype, stored):
    named = narrow_operands(dtype, stored, F32, 2064, (40, 16), bias=F32, rows=9)
    for name in SCALES[:2]:
        named[name].fill_(1)
    plain = {name: t.to(dtype) if name in WEIGHTS else t for name, t in named.items() if name not in SCALES}
    for arch in (SM90, *OLD):
        got, want = (emulate(served(problem_of(of), 56, arch), of, arch) for of in (named, plain))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), arch


@WITH_GXX
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_scale_multiplies_the_sum_once(dtype):
    """Powers of two commute with rounding: the result is the unscaled one times the scale."""
    named = narrow_operands(dtype, I8, F32, 1024, (40,), bias=None, rows=3, out=F32)
    one, scaled = ({**named, "scale": torch.full((40,), scale)} for scale in (1.0, 2.0**-7))
    spec = served(problem_of(named), 40)
    assert torch.equal(emulate(spec, one)[0] * 2.0**-7, emulate(spec, scaled)[0])


@WITH_GXX
def test_several_weights_have_the_bits_of_each_alone():
    together = narrow_operands(BF16, E4M3, F32, 1040, (24, 8, 40), bias=F32, rows=3)
    laws.weights_are_as_alone(together)


@WITH_GXX
@pytest.mark.parametrize("arch", OLD, ids=str)
@pytest.mark.parametrize(("dtype", "stored", "scale"), TYPES, ids=IDS)
def test_kernels_of_older_cards_agree_with_float64_and_among_rows(dtype, stored, scale, arch):
    whole = narrow_operands(dtype, stored, scale, 400, (40,), bias=F32, rows=9)
    exact = {n: t.double() for n, t in whole.items()}
    reference(**exact, dtype=torch.float64)
    few = {name: t[2:3] if name in ("x", "out") else t for name, t in whole.items()}
    wide, narrow = (FmaSpec(**fields_of(problem_of(named)), tile=tile) for named, tile in ((whole, 2), (few, 4)))
    (first,), (alone,) = emulate(wide, whole, arch), emulate(narrow, few, arch)
    assert torch.equal(alone[0], first[2])
    assert torch.allclose(first.double(), exact["out"], rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize("narrow", [Narrow.I8, Narrow.E4M3])
def test_tensor_cores_serve_all_sizes_of_both_numbers_of_rows(arch, rows, narrow):
    for k in (16, 512, 528, 4096, 28672):
        problem = SkinnyProblem(k=k, rows=rows, narrow=narrow, scale=DType.F32)
        assert all(isinstance(served(problem, n, Arch.parse(arch)), SkinnySpec) for n in (8, 2048, 18560, 262144)), k


def test_the_function_multiplies_the_dequantised_weights():
    x, w, scale = torch.randn(2, 3, 48).bfloat16(), torch.randint(-128, 128, (16, 48)).to(I8), torch.rand(16)
    out = ssmgen.skinny_linear(x, w, scale=scale, out=torch.empty(2, 3, 16))
    assert torch.allclose(out, x.float() @ (w.float() * scale[:, None]).t(), rtol=1e-5, atol=1e-3)
    assert ssmgen.skinny_linear(x, w, scale=scale).dtype == BF16
    e4m3 = torch.randn(8, 48).to(E4M3)
    pair = ssmgen.skinny_linear(x, [e4m3, e4m3], scale=[scale[:8].bfloat16(), scale[8:].bfloat16()])
    assert isinstance(pair, tuple) and torch.equal(pair[0], ssmgen.skinny_linear(x, e4m3, scale=scale[:8].bfloat16()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_have_scales(backend):
    w, scale = torch.randint(-128, 128, (16, 48)).to(I8), torch.rand(16)

    def two(x):
        return ssmgen.skinny_linear(x, [w, w[:8]], scale=[scale, scale[:8]])

    x = torch.randn(3, 48).half()
    assert all(torch.equal(a, b) for a, b in zip(torch.compile(two, fullgraph=True, backend=backend)(x), two(x), strict=True))


def problems_of(*args, **kwargs):
    with pytest.raises(ssmgen.errors.ArgumentError) as e:
        ssmgen.skinny_linear(*args, **kwargs)
    return e.value.problems


def test_what_is_wrong_with_scales_and_types_is_said():
    x, i8, scale = torch.zeros(2, 48).half(), torch.zeros(16, 48, dtype=I8), torch.ones(16)
    assert problems_of(x, i8) == ["weight is int8 and scale is None; expected a scale for each of its rows. Pass scale."]
    assert problems_of(x.float(), i8, scale=scale) == ["weight is int8 and x is float32; expected x in float16 or bfloat16. Convert x."]
    assert problems_of(x, i8, scale=scale.bfloat16()) == ["scale is bfloat16; expected float32 or x's dtype"]
    assert problems_of(x, i8, scale=scale[:8]) == ["scale is [8]; expected [N] = [16]"]
    assert problems_of(x, [i8, i8], scale=scale) == ["scale has 1 tensors; expected 2, one per weight"]
    assert problems_of(x, [i8, i8.to(E4M3)], scale=[scale, scale]) == ["weight has tensors of float8_e4m3fn and int8; expected one dtype"]
    assert problems_of(x, [i8, i8], scale=[scale, scale.half()]) == ["scale has tensors of float16 and float32; expected one dtype"]
    assert "weight is torch.int16; expected float32, float16, bfloat16, or with scales int8 or float8_e4m3fn" in problems_of(x, i8.short())
    (problem,) = problems_of(x[:, :40], i8[:, :40], scale=scale)
    assert problem == "x is [2, 40]; expected [*rows, K] with K a multiple of 16 up to 131072"
    shifted = torch.zeros(17 * 56, dtype=I8)[: 16 * 56].view(16, 56)[:, :48]
    assert "weight has rows 56 elements apart; expected rows at multiples of 16 bytes" in problems_of(x, shifted, scale=scale)


def test_specs_that_cannot_be_are_refused_in_words():
    how = {"tiles": 1, "stages": 4}
    assert "x is f32 and weights have 8 bits; expected x in bf16 or f16" in SkinnySpec(
        k=512, x=DType.F32, out=DType.F32, narrow=Narrow.I8, scale=DType.F32, **how
    ).violations(SM90)
    assert any("narrow is given and scale is not" in fault for fault in SkinnySpec(k=512, narrow=Narrow.I8, **how).violations(SM90))
    assert any("narrow is i16" in fault for fault in FmaSpec(k=512, narrow=Narrow.I16, scale=DType.F32, tile=1).violations(SM90))
    assert any("k is 1000" in fault for fault in SkinnySpec(k=1000, narrow=Narrow.E4M3, scale=DType.F32, **how).violations(SM90))
