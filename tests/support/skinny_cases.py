"""Operands and emulated calls of skinny_linear, for its tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ssmgen import emulator
from ssmgen.calls.checks import NARROW
from ssmgen.families.skinny_linear import call as op
from ssmgen.families.skinny_linear.operands import BIASES, OUTS, SCALES, WEIGHTS
from ssmgen.families.skinny_linear.problem import SkinnyProblem
from ssmgen.families.skinny_linear.reference import skinny_linear as reference
from ssmgen.families.skinny_linear.rules import space
from ssmgen.families.skinny_linear.spec import FmaSpec
from ssmgen.select import registry
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch, Pdl, changed

SM90 = Arch.parse("sm_90a")
NAN = float("nan")
WITH_GXX = pytest.mark.skipif(not emulator.available(), reason="needs g++")
Named = dict[str, Tensor]


def by_name(**named: Tensor) -> Named:
    """The operands in the kernels' order."""
    return {name: named[name] for name in op.OPERANDS.names if name in named}


def wide(*shape: int, dtype: torch.dtype, shift: int = 0, gap: int = 8) -> Tensor:
    """Normal values, with NaN between the rows."""
    t = torch.full((*shape[:-1], shape[-1] + gap), NAN, dtype=dtype)[..., shift : shift + shape[-1]]
    return t.copy_(torch.randn(shape))


def operands(
    dtype: torch.dtype, k: int, counts: tuple[int, ...], bias: torch.dtype | None, odd: int, rows: int, out: torch.dtype | None = None
) -> Named:
    """Strided x, weights and outputs, with NaN between their rows. odd: elements by which x is shifted in memory."""
    torch.manual_seed(0)
    named = {"x": wide(16, k, dtype=dtype, shift=odd)[:rows]}
    named |= {name: wide(n, k, dtype=dtype) for name, n in zip(WEIGHTS, counts, strict=False)}
    named |= {name: torch.randn(n).to(bias) for name, n in zip(BIASES, counts, strict=False)} if bias else {}
    named |= {name: wide(rows, n, dtype=out or dtype).fill_(NAN) for name, n in zip(OUTS, counts, strict=False)}
    return by_name(**named)


def narrow_operands(
    dtype: torch.dtype, stored: torch.dtype, scale: torch.dtype, k: int, counts: tuple[int, ...], bias: torch.dtype | None, rows: int,
    out: torch.dtype | None = None,
) -> Named:  # fmt: skip
    """The same with weights of 8 bits, between whose rows are the bits of NaN, and their scales."""
    named = operands(dtype, k, counts, bias, 0, rows, out)
    most = NARROW[stored].largest
    for weight, of_rows in zip(WEIGHTS, SCALES, strict=True):
        if weight in named:
            values = torch.randn(named[weight].shape).mul_(most / 3).clamp_(-most, most)
            with_gaps = torch.full((values.shape[0], k + 16), 0x7F, dtype=torch.uint8).view(stored)[:, :k]
            named[weight] = with_gaps.copy_(values.round() if stored is torch.int8 else values)
            named[of_rows] = ((torch.rand(values.shape[0]) + 0.5) * (3 / most)).to(scale)
    return by_name(**named)


def problem_of(named: Named) -> SkinnyProblem:
    return op.problem_of(named, {n: t.data_ptr() for n, t in named.items()}, op.Options())


def emulate(spec: Any, named: Named, arch: Arch = SM90) -> list[Tensor]:
    """The outputs of a variant."""
    fresh = {n: torch.full_like(t, NAN) if n in OUTS else t for n, t in named.items()}
    packed = Arguments(spec, op.kernel_values(spec, fresh, op.Options())).at([fresh[n].data_ptr() for n in spec.operands()])
    emulator.run(spec, arch, op.grid_of(spec, fresh), packed, fresh, tuple(OUTS))
    return [fresh[n] for n in OUTS if n in fresh]


def served(problem: SkinnyProblem, size: int, arch: Arch = SM90) -> Any:
    return registry.select("skinny_linear", problem, size, arch, arch >= SM90)


def fields_of(problem: SkinnyProblem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in problem.__dataclass_fields__}


def variants(problem: SkinnyProblem) -> list[Any]:
    """Variants that differ in every choice, with a wait."""
    found: list[Any] = [s for s in space(problem, SM90) if s.pdl is Pdl.TRIGGER_LOADED]
    if isinstance(found[0], FmaSpec):
        return [s for s in found if (s.tile, s.depth, s.warps) in ((1, 1, 4), (2, 4, 8), (4, 2, 4))]
    few, many = sorted({s.slots for s in found})
    wanted = ((1, 4, 1, few), (2, 4, 2, few), (3, 6, 1, many), (3, 4, 1, many), (1, 4, 2, many), (1, 2, 1, many))
    chosen = [s for s in found if (s.tiles, s.stages, s.held, s.slots) in wanted]
    return [*chosen, *(changed(s, warps=4) for s in chosen[:1])]


def variants_agree(named: Named) -> set[type]:
    """Variants have the same bits, within rounding of float64. Returns their kinds."""
    exact = {n: t.double() for n, t in named.items()}
    reference(**exact, dtype=torch.float64)
    specs = variants(problem_of(named))
    results = [emulate(spec, named) for spec in specs]
    assert len(results) >= 3
    for spec, outs in zip(specs, results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(outs, results[0], strict=True)), spec
    # One rounding of the result, and of each f32 sum: of K products of normal numbers.
    x = named["x"]
    slack = 8 * x.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps * 8
    for got, name in zip(results[0], OUTS, strict=False):
        assert torch.allclose(got.double(), exact[name], rtol=torch.finfo(x.dtype).eps, atol=slack)
    return {type(s) for s in specs}


def weights_are_as_alone(together: Named) -> None:
    """A product of several weights has the bits of each one's by itself."""
    outs = emulate(served(problem_of(together), 72), together)
    for *names, got in zip(WEIGHTS, BIASES, SCALES, OUTS, outs, strict=False):
        own = {role: together[name] for role, name in zip(("weight", "bias", "scale", "out"), names, strict=True) if name in together}
        alone = by_name(x=together["x"], **own)
        assert torch.equal(emulate(served(problem_of(alone), 24), alone)[0], got), names
