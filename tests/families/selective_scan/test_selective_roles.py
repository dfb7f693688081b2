"""selective_scan by warps of two kinds: the laws of its results in the emulator, and the bits of the form without roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import selective_cases as laws
from emulated_calls import needs_emulator
from kernel_laws import edited
from selection import costly
from selective_cases import BF16, F16, F32, SM90, Sizes, emulated, make, same, variant
from test_selective_scan import PROBLEMS

from ssmgen import emulator
from ssmgen.emulator.check import check
from ssmgen.errors import SpecError
from ssmgen.families.selective_scan.problem import OPERATOR, Order, SelectiveProblem
from ssmgen.families.selective_scan.roles import RolesSpec, roles_space
from ssmgen.families.selective_scan.rules import space
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, DType, changed, flat

SMALL = Sizes()
EXACT = replace(SMALL, x=F32)


def by(**how: Any) -> Callable[[SelectiveProblem], RolesSpec]:
    """A function that makes a problem's variant with small blocks."""

    def of(problem: SelectiveProblem) -> RolesSpec:
        plain = variant()(problem)
        spec = changed(RolesSpec(**flat(plain), abreast=1, aides=1), **how)
        assert not (found := spec.violations(SM90)), found
        return spec

    return of


run = partial(emulated, spec=by(abreast=2, aides=2))


@costly(4)
@needs_emulator
@pytest.mark.parametrize("x", [F32, BF16])
@pytest.mark.parametrize("kind", [{}, {"z": False}, {"step": 3.0, "decay": 4.0}, {"step": 0.01, "decay": 1e-3}])
def test_results_are_those_of_float64(kind, x):
    laws.is_accurate(run, replace(SMALL, x=x), 150, **kind)


@needs_emulator
def test_laws_of_sequences():
    laws.lengths_are_accurate(run, EXACT)
    laws.packing_changes_no_bit(run, SMALL, (65, 0, 7, 1, 32))
    laws.neighbours_do_not_matter(run, SMALL, (5, 16, 21))
    for cut in (4, 64):
        laws.a_cut_changes_no_bit(run, SMALL, 75, cut)


@needs_emulator
@pytest.mark.parametrize("state", [F32, BF16])
def test_a_pool_is_touched_where_it_should_be(state):
    laws.a_pool_is_touched_where_it_should_be(run, SMALL, state)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("sizes", [EXACT, replace(SMALL, x=F16, groups=2), replace(SMALL, dim=21, d_state=6)], ids=["f32", "groups", "odd"])
def test_layout_changes_no_bit(sizes):
    laws.layout_changes_no_bit(partial(emulated, spec=by(lanes=2)), sizes, 22)


HOWS: list[dict[str, Any]] = [
    {},
    {"abreast": 2},
    {"abreast": 2, "lead": 4, "tile": 32, "aides": 4},
    {"abreast": 2, "lead": 1, "tile": 8, "aides": 2, "warps": 2},
    {"lanes": 2, "lead": 3, "tile": 32},
    {"aides": 2, "apart": True, "lead": 0},
]


@costly(1)
@needs_emulator
@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("d_state", [16, 36])
def test_bits_are_those_without_roles(first, d_state):
    call: dict[str, Any] = make(replace(SMALL, d_state=d_state), 2, 37) | {"return_final_states": True}
    if first:
        call = laws.channels_first(call, True)
    wanted = emulated(**call)
    for how in HOWS:
        assert all(same(a, b) for a, b in zip(emulated(**call, spec=by(**how)), wanted, strict=True)), how


@needs_emulator
@pytest.mark.parametrize("how", [{}, {"abreast": 2, "lanes": 2}])
def test_bits_of_segments_are_those_without_roles(how):
    call: dict[str, Any] = make(SMALL, 1, 384, step=0.01, decay=1e-2) | {"return_final_states": True, "segments": 3}
    wanted = emulated(**call, spec=variant())
    assert not same(emulated(**call | {"segments": 1})[1], wanted[1]), "nothing was cut"
    assert all(same(a, b) for a, b in zip(emulated(**call, spec=by(**how)), wanted, strict=True))


@costly(1)
@needs_emulator
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("__syncthreads();  // complete: d and d u", "// complete: d and d u"),
        ("wait_copies<kAhead - 3>();\n    }", "}"),
        ("n % 3 * kStepWords", "n % 2 * kStepWords"),
        ("if (4 * cell.run + token < rows && 2 * cell.pair + channel < int(width)) store", "store"),
        ("has_channel[c] && n < kState ? kLog2E", "n < kState ? kLog2E"),
    ],
    ids=["barrier", "copies", "steps", "bounds", "channels"],
)
def test_mistakes_are_found(old, new):
    with pytest.raises((emulator.EmulatorError, AssertionError), match=r"^(?!the edit)"):
        laws.is_accurate(partial(run, change=edited(old, new)), replace(SMALL, dim=21), 149)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("problem", PROBLEMS, ids=["pool", "few-states", "any-strides"])
def test_checks_of_variants(problem):
    assert check(by()(problem), SM90, 4).passed


def test_variants_that_cannot_be_say_why():
    spec = by()(SelectiveProblem(d_state=16))
    for how, words in (
        ({"aides": 3}, "aides is 3; expected 1, 2, 4"),
        ({"abreast": 3}, "abreast is 3; expected 1 or 2"),
        ({"lead": 5}, "lead is 5; expected 0 … 4"),
        ({"apart": True}, " aides; expected 2 or more warps"),
        ({"copy": 4, "warps": 16}, "a row is copied in 64 pieces; expected at most 32, the lanes of the aides"),
        ({"d_state": 256, "lanes": 8, "abreast": 2, "tile": 8}, "a lane holds 64 states; expected at most"),
        ({"warps": 32}, "warps is 32 and aides 1; expected at most 32 together"),
    ):
        with pytest.raises(SpecError, match=words):
            replace(spec, **how).check(SM90)


def times_of(quads: list[int]) -> int:
    """Times that shared memory is accessed for 16 bytes of each lane: a quarter of a warp at once, if all are in other banks."""
    quarters = [set(quads[i : i + 8]) for i in range(0, 32, 8)]
    return sum(max(Counter(q % 8 for q in quarter).values()) for quarter in quarters)


@pytest.mark.parametrize("layout", Order)
@pytest.mark.parametrize(
    "how", [{}, {"warps": 8}, {"lanes": 2}, {"abreast": 2}, {"abreast": 2, "tile": 16}, {"abreast": 2, "lanes": 2, "tile": 8}]
)
def test_lanes_meet_all_banks(how, layout):
    """Sums where lanes leave them, and where aides add them up; and steps where they are walked."""
    made = by(**{"warps": 4, "aides": 4, "tile": 32} | how)(SelectiveProblem(d_state=16, layout=layout, z=True))
    pairs, beside = made.channels // 2, min(4, made.tile // 4)
    place = [lane // made.lanes for lane in range(32)]
    at = [p if made.abreast == 2 else p % 2 * made.half + p // 2 for p in place]
    cells = [(lane // pairs, lane % pairs) if layout is Order.LAST else (lane % beside, lane // beside) for lane in range(32)]
    assert times_of([lane % made.lanes * made.sum_pitch // 4 + at[lane] for lane in range(32)]) == 4
    assert times_of([run * made.sum_run // 4 + pair for run, pair in cells]) == 4
    assert times_of(at) == 4


def test_they_are_tried_and_their_bits_are_of_a_form_without_roles():
    problem = SelectiveProblem(d_state=16, z=True)
    tried = list(space(problem, SM90))
    found = [spec for spec in tried if isinstance(spec, RolesSpec)]
    assert found == list(roles_space(problem, SM90)) and len(found) > 20
    assert {spec.order for spec in found} <= {spec.order for spec in tried if not isinstance(spec, RolesSpec)}


@pytest.mark.parametrize("layout", Order)
def test_the_rule_takes_them_for_what_one_block_per_sm_has(layout):
    def chosen(size: int, arch: Arch = SM90, **how: Any) -> bool:
        fixed: dict[str, Any] = {"d_state": 16, "layout": layout, "key_layout": layout, "z": True, "D": DType.F32, "delta_bias": DType.F32}
        return isinstance(select(OPERATOR, SelectiveProblem(**fixed | how), size, arch, arch >= SM90), RolesSpec)

    assert chosen(8192) and chosen(1536) and chosen(8192, d_state=13, x=DType.F16, final=True)
    assert not chosen(8 * 1536) and not chosen(2 * 8192) and not chosen(65536), "no gain"
    assert not any(chosen(8192, **how) for how in ({"x": DType.F32}, {"d_state": 32}, {"copy": 0}, {"segments": 8}))
    assert not chosen(8192, Arch.parse("sm_80")), "there is less shared memory"
