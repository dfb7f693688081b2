"""gated_layer_norm: its reference, its kernels in the emulator, against float64 within a bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_calls import SM90, emulate, needs_emulator
from norm_cases import BF16, F16, F32
from ssu_cases import ulp
from torch import Tensor
from torch.nn.functional import layer_norm, silu

import ssmgen
from ssmgen.compat import mamba_ssm, vllm
from ssmgen.errors import ArgumentError, UnsupportedError
from ssmgen.families.gated_rms_norm import centred as op
from ssmgen.families.gated_rms_norm import spec as kernels
from ssmgen.spec.kernel import DType, Pdl

# dtypes; rows, groups, size; options. `mean`: of x, whose spread is 1. A bias is like the weight
CASES: dict[str, dict[str, Any]] = {
    "behind": {"norm_before_gate": True},
    "ahead": {},
    "plain": {"gate": None},
    "bare": {"gate": None, "weight": None, "bias": None},
    "no-bias": {"bias": None, "size": 64},
    "far-from-zero": {"x": F32, "out": F32, "mean": 300.0, "norm_before_gate": True},
    "constant": {"spread": 0.0, "mean": 3.0, "x": F32, "gate": None},
    "groups": {"groups": 4, "size": 96, "each": True, "norm_before_gate": True},
    "one-weight": {"groups": 3, "size": 32},
    "f16": {"x": F16, "gate": F16, "weight": F32, "bias": F16, "out": F16, "activation": "sigmoid", "norm_before_gate": True},
    "smallest": {"size": 1, "weight": F32},
    "three": {"size": 3, "groups": 5},
    "any": {"size": 387, "odd": True, "norm_before_gate": True, "mean": 2.0},
    "not-whole": {"size": 100},
    "odd": {"size": 132, "odd": True, "norm_before_gate": True},
    "a-block": {"size": 1280, "mean": 2.0},
    "passes": {"size": 16384, "rows": 1, "x": F32, "mean": -1.0, "norm_before_gate": True},
}
cases = pytest.mark.parametrize("name", CASES)


def operands(name: str, seed: int = 0) -> dict[str, Any]:
    """The keywords of a call. Outputs hold NaN."""
    case = {"x": BF16, "gate": BF16, "weight": BF16, "bias": BF16, "out": BF16, "size": 128, "rows": 3, "groups": 1} | CASES[name]
    g = torch.Generator().manual_seed(seed)
    channels = case["groups"] * case["size"]

    def made(dtype: torch.dtype, factor: float, shift: float = 0.0) -> Tensor:
        wide = factor * torch.randn(case["rows"], channels + (9 if case.get("odd") else 8), generator=g) + shift
        return wide.to(dtype)[:, :channels]

    call: dict[str, Any] = {"x": made(case["x"], case.get("spread", 1.0), case.get("mean", 0.0))}
    if case["gate"]:
        call["gate"] = made(case["gate"], 2.0)
    for name in ("weight", "bias"):
        if case[name]:
            call[name] = torch.randn(channels if case.get("each") else case["size"], generator=g).to(case[name])
    call["out"] = torch.full_like(made(case["out"], 1.0), math.nan)
    return call | {"group_size": case["size"]} | {o: case[o] for o in ("norm_before_gate", "activation") if o in case}


def expected(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(the result in float64, how far one computed in f32 may be off).

    Sums are chains of 4 after up to 12 levels of pairs: a mean is off by 17 roundings of the elements' average size, and so is each
    difference from it. A gate before the norm adds the 2 |gate| + 9 of its logistic function to each. Half of the relative error of the sum
    of squares is in its root, and rsqrt.approx adds 2 ulp. A product with the weight, a sum and a gate follow.
    """
    built = ssmgen.gated_layer_norm.build(**call)
    views = {n: t.double() for n, t in op.CALLER.checked(built.operands, built.options, None).items()}
    out, eps = torch.empty_like(views["out"]), 2.0**-24
    op.CALLER.reference(views | {"out": out}, built.options, torch.float64)
    first = built.options.norm_before_gate
    gate = views.get("gate")
    factor = torch.ones_like(out) if gate is None else gate.sigmoid() * (1 if built.options.activation == "sigmoid" else gate)
    of_gate = torch.zeros_like(out) if gate is None else (2 * gate.abs() + 9) * eps
    v = views["x"] if first else views["x"] * factor
    of_v = v.abs() * (eps if first else of_gate + eps)
    c = v - v.mean(-1, keepdim=True)
    off = of_v + 20 * eps * v.abs().mean(-1, keepdim=True) + of_v.mean(-1, keepdim=True) + eps * c.abs()
    spread = c.square().mean(-1, keepdim=True) + built.options.eps
    root = spread.rsqrt()
    of_root = (c.abs() * off).mean(-1, keepdim=True) / spread + 16 * eps
    normed = (off + c.abs() * of_root) * root + 2 * eps * (c * root).abs()
    weight, bias = (views[n].abs() if n in views else 1.0 - (n == "bias") for n in ("weight", "bias"))
    bound = normed * weight + 2 * eps * ((c * root).abs() * weight + bias)
    if first:
        bound = bound * factor.abs() + out.abs() * (of_gate + eps)
    return out, 1.5 * bound + 2.0**-100 + torch.where(out != 0, 0.5 * ulp(out, call["out"].dtype), 0)


def assert_matches(call: dict[str, Any], want: tuple[Tensor, Tensor]) -> None:
    out, bound = want
    excess = ((call["out"].double().view_as(out) - out).abs() / bound).nan_to_num(nan=math.inf)
    assert excess.max() <= 1, f"out is off by {float(excess.max()):.2f} x its bound"


@cases
def test_the_reference_is_torchs_layer_norm(name):
    call = operands(name)
    got = ssmgen.gated_layer_norm(**call)
    assert got is call["out"]
    assert_matches(call, expected(call))
    size, rows = call["group_size"], call["x"].shape[0]
    x, gate = (None if t is None else t.double().reshape(rows, -1, size) for t in (call["x"], call.get("gate")))
    factor = 1 if gate is None else torch.sigmoid(gate) if call.get("activation") == "sigmoid" else silu(gate)
    behind = call.get("norm_before_gate", False)
    normed = layer_norm(x if behind else x * factor, (size,), eps=1e-5)
    weight, bias = (call[n].double().reshape(-1, size) if n in call else 1 - (n == "bias") for n in ("weight", "bias"))
    want = (normed * weight + bias) * (factor if behind else 1)
    torch.testing.assert_close(expected(call)[0], want, rtol=1e-12, atol=1e-12)


@needs_emulator
@cases
def test_the_kernel_is_within_the_bound(name):
    call = operands(name)
    emulate(ssmgen.gated_layer_norm.build(**call))
    assert_matches(call, expected(call))


@needs_emulator
@pytest.mark.parametrize("name", ["behind", "a-block", "groups"])
def test_variants_are_bit_equal(name):
    call = operands(name)
    problem, *_ = ssmgen.gated_layer_norm.build(**call).problem()
    emulate(ssmgen.gated_layer_norm.build(**call))
    want = call["out"].clone()
    specs = list(kernels.space(problem, SM90))
    for spec in [replace(s, pdl=Pdl.OFF) for s in specs[:: max(1, len(specs) // 4)]]:
        call["out"].fill_(math.nan)
        emulate(ssmgen.gated_layer_norm.build(**call), spec)
        assert torch.equal(call["out"], want), spec


@needs_emulator
def test_in_place():
    call = operands("behind")
    want = expected(call)
    there = call | {"x": (x := call["x"].clone()), "out": x}
    emulate(ssmgen.gated_layer_norm.build(**there))
    assert_matches(there, want)


def test_the_drop_ins():
    """vLLM's, of [rows, channels], and mamba-ssm's, of any rows."""
    call = operands("groups")
    x, z, weight, bias, size = call["x"], call["gate"], call["weight"], call["bias"], call["group_size"]
    want = ssmgen.gated_layer_norm(x, z, weight, bias, group_size=size, norm_before_gate=True)
    got, *_ = vllm.layer_norm_fwd(x, weight, bias, 1e-5, z=z, group_size=size)
    assert torch.equal(got, want)
    x, z = x.contiguous().view(1, *x.shape), z.contiguous().view(1, *z.shape)
    assert torch.equal(mamba_ssm.layernorm_fn(x, weight, bias, z, 1e-5, size), want[None])
    plain = ssmgen.gated_rms_norm(x, z, weight, 1e-6, group_size=size)
    assert torch.equal(mamba_ssm.rmsnorm_fn(x, weight, None, z, group_size=size, norm_before_gate=False), plain)
    with pytest.raises(UnsupportedError, match="bias is given; expected None for an RMS norm"):
        mamba_ssm.rmsnorm_fn(x, weight, bias)


def test_everything_wrong_is_said_at_once():
    x = torch.randn(2, 64)
    with pytest.raises(ArgumentError) as e:
        ssmgen.gated_layer_norm(x, torch.randn(2, 32), eps=-1.0)
    assert "gate is [2, 32]" in str(e.value) and "eps is -1.0" in str(e.value)
    with pytest.raises(ArgumentError) as e:
        ssmgen.gated_layer_norm(x, None, torch.randn(32), torch.randn(16))
    assert "weight is [32]" in str(e.value) and "bias is [16]" in str(e.value)


def test_what_a_spec_without_the_mean_has_not():
    problem = kernels.NormProblem(size=64, bias=DType.BF16)
    assert problem.faults() == ["bias is set and centred is no; expected centred=yes"]
    plain = replace(problem, centred=True, gate=None)
    assert not plain.faults()
    assert replace(plain, unit_offset=True).faults() == ["centred is yes with residual, unit_offset or rounded; expected none of them"]
