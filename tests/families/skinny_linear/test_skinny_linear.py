"""skinny_linear: the laws that hold for every variant."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import skinny_cases as laws
import torch
from skinny_cases import NAN, SM90, WITH_GXX, emulate, fields_of, operands, problem_of, served

import ssmgen
from ssmgen import emulator
from ssmgen.compile.render import render
from ssmgen.families.skinny_linear import call as op
from ssmgen.families.skinny_linear.operands import OUTS, WEIGHTS
from ssmgen.families.skinny_linear.problem import SkinnyProblem
from ssmgen.families.skinny_linear.reference import skinny_linear as reference
from ssmgen.families.skinny_linear.rules import candidates
from ssmgen.families.skinny_linear.spec import FmaSpec, SkinnySpec
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch, DType, Loads

CASES = [
    (torch.bfloat16, 1536, (72,), None, 0),
    (torch.float16, 1000, (24, 8, 40), torch.float32, 1),
    (torch.float32, 200, (40, 16), torch.float32, 1),
    (torch.float32, 256, (48,), None, 0),
]
IDS = ["bf16", "f16-three-biased-odd", "f32-two-biased-odd", "f32"]


@WITH_GXX
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_variants_are_bit_equal_and_within_rounding_of_float64(case):
    assert len(laws.variants_agree(operands(*case, rows=3))) == 1


@WITH_GXX
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_row_has_the_same_bits_beside_any_others(case):
    """The variants that serve 1, 5, 8, 9 and 16 rows agree."""
    whole = operands(*case, rows=16)
    n = sum(t.shape[0] for name, t in whole.items() if name in WEIGHTS)
    all_rows = emulate(served(problem_of(whole), n), whole)
    for rows in (1, 5, 8, 9):
        few = {name: t[-rows:] if name in ("x", *OUTS) else t for name, t in whole.items()}
        problem = problem_of(few)
        assert problem.rows == (8 if rows <= 8 else 16)
        for got, want in zip(emulate(served(problem, n), few), all_rows, strict=True):
            assert torch.equal(got, want[-rows:]), rows


@WITH_GXX
@pytest.mark.parametrize("case", CASES[:2], ids=IDS[:2])
def test_other_rows_do_not_matter_even_if_they_are_nan(case):
    clean, dirty = operands(*case, rows=9), operands(*case, rows=9)
    dirty["x"][3].fill_(NAN)
    dirty["x"][8].fill_(float("inf"))
    spec = served(problem_of(clean), 72)
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert all(torch.equal(a[kept], b[kept]) for a, b in zip(emulate(spec, clean), emulate(spec, dirty), strict=True))


@WITH_GXX
def test_several_weights_have_the_bits_of_each_alone():
    laws.weights_are_as_alone(operands(*CASES[1], rows=3))


@WITH_GXX
def test_more_tiles_than_sums_in_registers():
    """Blocks take more tiles later: x is loaded again, and the memory of sums is reused."""
    named = operands(torch.bfloat16, 1536, (200,), None, 0, rows=2)
    few, many = (SkinnySpec(**fields_of(problem_of(named)), tiles=t, stages=4, held=h, joined=1) for t, h in ((1, 1), (6, 3)))
    assert torch.equal(emulate(few, named)[0], emulate(many, named)[0])


# A case of each rule: elements of a row, rows of x, rows of the weight, and fields of the variant.
RULES = {
    "short rows": (128, 8, 20480, {"tiles": 2, "stages": 6, "held": 1, "min_blocks": 2}),
    "short rows, 16": (512, 16, 8192, {"tiles": 1, "stages": 6, "held": 1, "min_blocks": 2}),
    "x of 112 registers": (7168, 8, 2048, {"tiles": 1, "stages": 4, "held": 7}),
    "x of 96 registers, 16": (2304, 16, 9216, {"tiles": 1, "stages": 4, "held": 3}),
    "several tiles": (8192, 8, 4096, {"tiles": 2, "stages": 4, "held": 2}),
    "many tiles, 16": (4096, 16, 12288, {"tiles": 6, "stages": 4, "held": 1}),
    "equal numbers of tiles, 16": (4096, 16, 18560, {"tiles": 5, "stages": 4, "held": 1}),
    "few tiles, 16": (4096, 16, 4096, {"tiles": 2, "stages": 4, "held": 2}),
    "a head": (2048, 8, 248320, {"tiles": 1, "stages": 2, "held": 2}),
}


@WITH_GXX
@pytest.mark.parametrize("rule", RULES)
def test_rules_choose_as_measured_and_change_no_bit(rule):
    k, rows, n, fields = RULES[rule]
    named = operands(torch.bfloat16, k, (232,), None, 0, rows=rows)
    problem = problem_of(named)
    chosen = served(problem, n)
    assert {name: getattr(chosen, name) for name in fields} == fields
    plain = SkinnySpec(**fields_of(problem), tiles=1, stages=2, held=1, joined=1)
    assert torch.equal(emulate(chosen, named)[0], emulate(plain, named)[0])


def test_x_that_is_normed_or_loaded_by_elements_takes_fewer_registers():
    """These variants spill with 112 registers of x."""
    plain = SkinnyProblem(k=7168)
    assert served(plain, 2048).held == 7
    for other in ({"loads": Loads.ELEMENT}, {"norm": DType.BF16}):
        assert served(replace(plain, **other), 2048).held < 7


@WITH_GXX
def test_weights_are_read_before_the_wait_and_x_is_not():
    named = operands(*CASES[0], rows=2)
    for spec in (served(problem_of(named), 72), served(problem_of(operands(*CASES[3], rows=2)), 48)):
        text = render(spec, SM90)
        assert spec.early_operands() == ["weight"]
        before, after = text[text.index(f"\n{spec.name}(") :].split("wait_for_upstream();")
        assert "weight" in before and not re.search(r"load_x|read\(x|\(x \+", before) and re.search(r"load_x|read\(x", after)
    late = served(problem_of(named), 72)
    with pytest.raises(emulator.EmulatorError, match="wait"):  # the emulator sees a load of x before the wait
        text = render(late, SM90).replace("  wait_for_upstream();", "  (void)load(x + rows);\n  wait_for_upstream();")
        packed = Arguments(late, op.kernel_values(late, named, op.Options())).at([named[n].data_ptr() for n in late.operands()])
        emulator.run_source(
            text, late.name, 3, late.threads_per_block, packed, named, tuple(OUTS), late.dynamic_bytes, early=late.early_operands()
        )


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120"])
def test_tensor_cores_serve_all_sizes_of_both_numbers_of_rows(arch, rows):
    """Otherwise 8 rows and 9 would have different orders of sums."""
    for k, n in itertools.product((8, 512, 4096, 28672), (8, 2048, 18560, 262144)):
        assert isinstance(served(SkinnyProblem(k=k, rows=rows), n, Arch.parse(arch)), SkinnySpec), (k, n)


@WITH_GXX
@pytest.mark.parametrize("case", CASES[:2], ids=IDS[:2])
def test_kernels_of_older_cards_agree_with_float64_and_among_rows(case):
    whole = operands(*case, rows=9)
    exact = {n: t.double() for n, t in whole.items()}
    reference(**exact, dtype=torch.float64)
    few = {name: t[2:3] if name in ("x", *OUTS) else t for name, t in whole.items()}
    tried = ((whole, 1, 2), (whole, 2, 4), (few, 4, 1))
    specs = [FmaSpec(**fields_of(problem_of(named)), tile=tile, depth=depth) for named, tile, depth in tried]
    first, second, alone = (emulate(spec, named) for spec, named in zip(specs, (whole, whole, few), strict=True))
    for one, other, row, name in zip(first, second, alone, OUTS, strict=False):
        assert torch.equal(one, other) and torch.equal(row[0], one[2])
        assert torch.allclose(one.double(), exact[name], rtol=torch.finfo(case[0]).eps, atol=1e-3)


def test_older_cards_and_f32_use_no_tensor_cores():
    assert isinstance(served(SkinnyProblem(k=512), 64, Arch(80)), FmaSpec)
    assert isinstance(served(SkinnyProblem(k=512, x=DType.F32, out=DType.F32), 64), FmaSpec)
    rules = {rule for rule, *_ in candidates(SkinnyProblem(k=512, loads=Loads.ELEMENT), 64, SM90, False)}
    assert rules == {"tensor-cores", "fma"}


def test_the_function_follows_linear():
    x, w, b = torch.randn(2, 3, 40), [torch.randn(16, 40), torch.randn(8, 40)], [torch.randn(16), torch.randn(8)]
    linear = torch.nn.functional.linear
    assert torch.allclose(ssmgen.skinny_linear(x, w[0], b[0]), linear(x, w[0], b[0]), atol=1e-5)
    outs = ssmgen.skinny_linear(x, w, b)
    assert isinstance(outs, tuple) and all(torch.allclose(y, linear(x, *p), atol=1e-5) for y, *p in zip(outs, w, b, strict=True))
    alone = ssmgen.skinny_linear(x[0, 0], w[:1])
    assert alone.shape == (16,) and torch.allclose(alone, linear(x[0, 0], w[0]), atol=1e-5)
    half, out = x.bfloat16(), torch.empty(2, 3, 16)
    assert ssmgen.skinny_linear(half, w[0].bfloat16(), out=out) is out and out.dtype == torch.float32
    assert ssmgen.skinny_linear(x[:, :0], w[0]).shape == (2, 0, 16)


def test_everything_wrong_is_in_one_message():
    with pytest.raises(ssmgen.errors.ArgumentError) as e:
        ssmgen.skinny_linear(torch.zeros(17, 40), [torch.zeros(16, 40).half(), torch.zeros(12, 40)], torch.zeros(16))
    assert (
        len(e.value.problems) == 2
        and "bias has 1 tensors; expected 2, one per weight" in str(e.value)
        and "weight[1] is [12, 40]" in str(e.value)
    )
    with pytest.raises(ssmgen.errors.ArgumentError) as e:
        ssmgen.skinny_linear(torch.zeros(17, 40), torch.zeros(16, 40).half())
    assert "17 rows; expected at most 16" in str(e.value) and "weight is float16; expected x's dtype" in str(e.value)
    with pytest.raises(ssmgen.errors.ArgumentError, match="does not begin at a multiple of 16 bytes"):
        shifted = torch.zeros(16 * 40 + 1)[1:].view(16, 40)
        ssmgen.explain(ssmgen.skinny_linear, torch.zeros(2, 40), shifted, arch="sm_90a")


def test_what_serves_a_call_is_explained():
    named = operands(torch.bfloat16, 1536, (72,), None, 0, rows=2)
    found = ssmgen.explain(ssmgen.skinny_linear, named["x"], named["weight"], out=named["out"], arch="sm_90a")
    assert found.chosen.rule == "tensor-cores" and found.size == 72
