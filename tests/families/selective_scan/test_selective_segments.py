"""selective_scan in segments: the laws of its results in the emulator, which sequences are cut, and that wrong kernels are found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import selective_cases as laws
import torch
from emulated_calls import needs_emulator
from kernel_laws import edited
from selection import costly
from selective_cases import BF16, F32, SM90, Sizes, emulated, error, exact, make, same, starts_of, states, variant

import ssmgen
from ssmgen import emulator
from ssmgen.emulator.check import check
from ssmgen.errors import ArgumentError, SpecError
from ssmgen.families.selective_scan.problem import CUT, LEAST, MOST, OPERATOR, SelectiveProblem
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, Index

SMALL = Sizes(dim=8)
EXACT = replace(SMALL, x=F32)
TOKENS = 4 * CUT  # of four parts
cut = partial(emulated, segments=4)


@needs_emulator
@pytest.mark.parametrize("kind", [{}, {"step": 0.01, "decay": 1e-3}, {"step": 3.0, "decay": 4.0}], ids=["trained", "memory", "decay"])
def test_results_are_those_of_float64(kind):
    laws.is_accurate(cut, EXACT, TOKENS, **kind)


@needs_emulator
def test_packing_and_neighbours_do_not_matter():
    laws.packing_changes_no_bit(cut, SMALL, (TOKENS - 7, 0, 5, 2 * CUT))
    laws.neighbours_do_not_matter(cut, SMALL, (TOKENS, 9))


@needs_emulator
def test_a_pool_of_sequences_that_are_cut():
    """States of sequences that begin, sequences that continue, and sequences without a slot."""
    lengths, slots = (TOKENS, TOKENS + 1, 2 * CUT + 1), torch.tensor([2, 0, -1])
    pool, started = states(SMALL, 4), torch.tensor([True, False, True])
    call = make(SMALL, sum(lengths)) | {"cu_seqlens": starts_of(lengths, "cpu"), "state_indices": slots, "has_initial_state": started}
    wanted, found = exact(call | {"state": pool.clone()}), pool.clone()
    out = cut(**call, state=found)
    assert error(out, wanted["out"][0]) <= laws.BOUNDS[BF16] and error(found, wanted["state"]) <= laws.BOUNDS[F32]
    assert same(found[[1, 3]], pool[[1, 3]]) and not out[2 * TOKENS + 1 :].any()


@costly(1)
@needs_emulator
@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
def test_variants_are_bit_equal(first):
    call: dict[str, Any] = make(SMALL, 1, TOKENS) | {"return_final_states": True}
    call = laws.channels_first(call, True) if first else call
    wanted = cut(**call)
    assert not same(emulated(**call, segments=1)[1], wanted[1]), "nothing was cut"
    for how in ({"lanes": 2}, {"lanes": 1, "tile": 32}, {"warps": 2, "tile": 64}):
        assert all(same(a, b) for a, b in zip(cut(**call, spec=variant(**how)), wanted, strict=True)), how


MISTAKES = {
    "too early": ("    cluster_wait();\n    if (rank + 1 < parts) {", "    if (rank + 1 < parts) {"),
    "decay": ("total += ", "total -= "),
    "every part's state": ("rank + 1 == parts && has_channel", "has_channel"),
}


@costly(1)
@needs_emulator
@pytest.mark.parametrize(("old", "new"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_found(old, new):
    with pytest.raises((emulator.EmulatorError, AssertionError), match=r"^(?!the edit)"):
        laws.is_accurate(partial(cut, change=edited(old, new)), EXACT, TOKENS)


@needs_emulator
def test_checks_of_variants():
    problem = SelectiveProblem(d_state=16, z=True, cu_seqlens=Index.I32, pool=True, started=True, index=Index.I64, segments=3)
    assert check(variant()(problem), SM90, 3).passed


def posed(dim: int, tokens: int, segments: int | None = None, d_state: int = 16) -> Any:
    call = make(Sizes(dim=dim, d_state=d_state), 1, 1)
    call |= {n: t.expand(1, tokens, -1) for n, t in call.items() if n in laws.PER_TOKEN}
    call["out"] = torch.empty(1, tokens, dim, dtype=BF16)
    return ssmgen.selective_scan.build(**call, segments=segments).problem()[0]


def test_few_channels_and_many_tokens_are_cut():
    assert [posed(dim, 4 * LEAST).segments for dim in (64, 1056, 1057, 2048)] == [MOST, MOST, 1, 1]
    assert posed(2048, 4 * LEAST - 1).segments == 1
    assert posed(64, 4 * LEAST, d_state=256).segments == 1, "too many states"
    assert posed(4096, 2 * CUT, 3).segments == 3 and posed(4096, 2 * CUT - 1, 3).segments == 1
    assert posed(8, 4 * LEAST, 1).segments == 1 and posed(8, 4 * LEAST, 1024).segments == MOST


def test_parts_cover_a_sequence():
    for most, least in ((2, CUT), (8, CUT), (8, LEAST)):
        problem = SelectiveProblem(d_state=16, segments=most, segment_tokens=least)
        for tokens in range(1, 5000, 37):
            parts, each = problem.cut(tokens)
            assert 1 <= parts <= most and (parts - 1) * each < tokens <= parts * each, (most, least, tokens)
            assert parts == 1 or each % CUT == 0


def test_cards_without_clusters_leave_sequences_whole():
    problem = SelectiveProblem(d_state=16, segments=8)
    assert select(OPERATOR, problem, 64, SM90, True).cluster_blocks == 8
    assert select(OPERATOR, problem, 64, Arch(80), False).cluster_blocks == 1
    with pytest.raises(SpecError, match="parts is 4; expected 1 or the problem's segments 8"):
        replace(select(OPERATOR, problem, 64, SM90, True), parts=4).check(SM90)


def test_what_segments_may_be():
    call = make(SMALL, 1, 2 * CUT)
    assert same(ssmgen.selective_scan(**call, segments=2), ssmgen.selective_scan(**call)), "the reference has none"
    for wrong in (0, 1025, "4", True):
        with pytest.raises(ArgumentError, match="an integer from 1 to 1024"):
            ssmgen.selective_scan(**call, segments=wrong)
