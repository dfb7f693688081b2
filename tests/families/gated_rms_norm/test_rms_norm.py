"""rms_norm, the norm between layers: its reference, its kernels in the emulator, and that they round where models do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_calls import SM90, emulate, needs_emulator
from norm_cases import BF16, F16, F32
from selection import costly

import ssmgen
from ssmgen.errors import ArgumentError
from ssmgen.families.gated_rms_norm import spec as kernels
from ssmgen.spec.kernel import DType, Pdl

# x, residual, residual_out, weight and out; rows, size; options
CASES: dict[str, dict[str, Any]] = {
    "mamba2": {"residual": F32, "round_before_weight": True, "size": 320},
    "first-layer": {"residual": BF16, "residual_out": F32, "round_before_weight": True},
    "llama": {"residual": BF16, "round_before_weight": True},
    "qwen": {"residual": BF16, "unit_offset": True, "weight": F32},
    "qwen-alone": {"unit_offset": True},
    "nemotron": {"residual": BF16},
    "last": {"residual": F32, "out": F32, "round_before_weight": True},
    "f16": {"x": F16, "residual": F16, "weight": F16, "out": F16, "round_before_weight": True, "unit_offset": True},
    "groups": {"residual": BF16, "unit_offset": True, "group_size": 64, "size": 256},
    "long": {"residual": F32, "round_before_weight": True, "size": 4096, "rows": 1},
    "any": {"residual": BF16, "round_before_weight": True, "size": 387, "rows": 2},
    "odd": {"residual": F32, "round_before_weight": True, "size": 100, "odd": True},
}
cases = pytest.mark.parametrize("name", CASES)


def operands(name: str, seed: int = 0) -> dict[str, Any]:
    """The keywords of a call. Outputs hold NaN."""
    case = {"x": BF16, "weight": BF16, "out": BF16, "size": 128, "rows": 3, "odd": False} | CASES[name]
    g = torch.Generator().manual_seed(seed)
    shape, wider = (case["rows"], case["size"]), case["size"] + (9 if case["odd"] else 8)

    def made(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape[0], wider, generator=g).to(dtype)[:, : shape[1]]

    call = {"x": made(case["x"]), "weight": torch.randn(shape[1], generator=g).to(case["weight"])}
    if residual := case.get("residual"):
        call["residual"] = made(residual)
        call["residual_out"] = torch.full(shape, float("nan"), dtype=case.get("residual_out", residual))
    call["out"] = torch.full(shape, float("nan"), dtype=case["out"])
    return call | {o: case[o] for o in ("unit_offset", "round_before_weight", "group_size") if o in case}


def as_models_do(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, the sum), cast by cast as modeling files have it."""
    total, weight, dtype = None, call["weight"], call["out"].dtype
    v = call["x"]
    if "residual" in call:
        total = (call["residual"].float() + v.float()).to(call["residual_out"].dtype)
        v = total.to(dtype)
    v = v.float().view(len(v), -1, call.get("group_size", v.shape[-1]))
    v = (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(1)
    v = v.to(dtype).float() if call.get("round_before_weight") else v
    return (v * (1 + weight.float() if call.get("unit_offset") else weight.float())).to(dtype), total


def assert_within_a_rounding(call: dict[str, Any], want: torch.Tensor, total: torch.Tensor | None) -> None:
    """The sum is exact. The mean uses a different order of summation. A value near the boundary of two roundings, of the normalised value
    or of the output, may then be off by one rounding; few values are."""
    if total is not None:
        assert torch.equal(call["residual_out"], total)
    got, eps = call["out"].double(), torch.finfo(call["out"].dtype).eps
    off = (got - want.double()).abs() > 8 * torch.finfo(F32).eps * want.double().abs()
    torch.testing.assert_close(got, want.double(), rtol=2 * eps + 8 * torch.finfo(F32).eps, atol=1e-30)
    assert off.sum() <= max(1, 0.02 * off.numel())


@cases
def test_the_reference_rounds_where_models_do(name):
    call = operands(name)
    want, total = as_models_do(call)
    got = ssmgen.rms_norm(**call)
    assert (got[0] is call["out"] and got[1] is call["residual_out"]) if "residual" in call else got is call["out"]
    assert_within_a_rounding(call, want, total)


@costly(3)
@needs_emulator
@cases
def test_the_kernel_rounds_where_models_do(name):
    call = operands(name)
    emulate(ssmgen.rms_norm.build(**call))
    assert_within_a_rounding(call, *as_models_do(call))


@needs_emulator
@pytest.mark.parametrize("name", ["mamba2", "qwen"])
def test_variants_are_bit_equal(name):
    call = operands(name)
    problem, size, *_ = ssmgen.rms_norm.build(**call).problem()
    emulate(ssmgen.rms_norm.build(**call))
    want = call["out"].clone(), call["residual_out"].clone()
    specs = list(kernels.space(problem, SM90))
    for spec in [replace(s, pdl=Pdl.OFF) for s in specs[:: max(1, len(specs) // 4)]]:
        call["out"].fill_(float("nan"))
        call["residual_out"].fill_(float("nan"))
        emulate(ssmgen.rms_norm.build(**call), spec)
        assert torch.equal(call["out"], want[0]) and torch.equal(call["residual_out"], want[1]), spec


@needs_emulator
def test_in_place():
    call = operands("llama")
    want, total = as_models_do(call)
    x, residual = call["x"].clone(), call["residual"].clone()
    there = {**call, "x": x, "residual": residual, "out": x, "residual_out": residual}
    emulate(ssmgen.rms_norm.build(**there))
    assert_within_a_rounding({**there, "x": call["x"]}, want, total)
    x.copy_(call["x"])
    residual.copy_(call["residual"])
    out, kept = ssmgen.rms_norm(x, call["weight"], residual=residual, residual_out=residual, round_before_weight=True)
    assert kept is residual and torch.equal(residual, total) and out.data_ptr() != x.data_ptr()


def test_new_tensors_are_of_the_dtypes_that_models_have():
    x, residual = torch.randn(2, 64, dtype=BF16), torch.randn(2, 64)
    out, total = ssmgen.rms_norm(x, residual=residual)
    assert out.dtype is BF16 and total.dtype is F32 and torch.equal(total, residual + x)
    assert ssmgen.rms_norm(x).dtype is BF16
    assert ssmgen.rms_norm(x, residual=x)[1].dtype is BF16


def test_everything_wrong_is_said_at_once():
    x = torch.randn(2, 64)
    with pytest.raises(ArgumentError) as e:
        ssmgen.rms_norm(x, residual_out=torch.empty(2, 64), unit_offset=True, out=torch.empty(3, 64))
    for words in (
        "one of residual and residual_out is missing; expected both",
        "unit_offset or round_before_weight is True and weight is None",
        "out is [3, 64]",
    ):
        assert words in str(e.value)
    with pytest.raises(ArgumentError, match="out overlaps residual_out"):
        ssmgen.rms_norm(x, residual=x.clone(), residual_out=(out := torch.empty(2, 64)), out=out)
    with pytest.raises(ArgumentError, match="residual is \\[2, 32\\]"):
        ssmgen.rms_norm(x, residual=torch.randn(2, 32))


def test_what_a_spec_with_a_gate_has_not():
    spec = kernels.NormProblem(size=64, residual=DType.BF16)
    assert spec.faults() == [
        "a gate is set with residual, unit_offset or rounded; expected either",
        "one of residual and sum is none; expected both or neither",
    ]
    assert replace(spec, gate=None, residual=None, weight=None, rounded=True).faults() == [
        "unit_offset or rounded is yes and weight is none; expected a weight"
    ]
