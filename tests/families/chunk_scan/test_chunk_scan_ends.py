"""chunk_scan by warpgroups, where one block has a sequence's first part and its last: laws, and wrong kernels, in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import attention_cases
import pytest
import scan_cases as laws
import torch
from compiled import compiled
from emulated_calls import needs_emulator
from kernel_laws import edited, found
from scan_cases import BF16, BOUNDS, F32, SM90, Sizes, emulated, error, exact, make, same
from selection import costly, few
from test_chunk_scan_warpgroups import SMALL, SPECS, variant

import ssmgen
from ssmgen.emulator.check import check
from ssmgen.families.chunk_scan.spec import ScanProblem, ScanSpec
from ssmgen.families.chunk_scan.warpgroups import LEAD, LEAST

pytestmark = needs_emulator

WHOLE = (LEAST + LEAST * LEAD[0] // LEAD[1]) * 64  # tokens: with more, a sequence is divided


def sharing(parts: int, stages: int = 2) -> Callable[[ScanProblem], ScanSpec]:
    def of(problem: ScanProblem) -> ScanSpec:
        spec = replace(variant(parts, stages)(problem), ends=True)
        assert not spec.violations(SM90)
        return spec

    return of


def by(parts: int, stages: int = 2, **more: Any) -> laws.Scan:
    return partial(emulated, spec=sharing(parts, stages), **more)


@costly(2)
@pytest.mark.parametrize(
    ("sizes", "parts", "stages", "tokens", "decay", "more"),
    [
        (SMALL, 2, 2, WHOLE + 1, 1e-3, {}),  # the last part has one token
        (SMALL, 2, 4, 64 * 26, 1e-3, {}),  # 5 chunks, and 11, and 10: buffers change sides, and phases their parity
        (SMALL, 3, 4, 64 * 29 - 3, 1e-2, {"z": True}),
        (SMALL, 4, 4, 64 * 14, 16.0, {"step": 3.0}),  # two of the four parts are empty
        (Sizes(heads=2, groups=1, headdim=64, d_state=128), 2, 4, 64 * 13, 0.1, {}),
        (Sizes(heads=1, headdim=128, d_state=64), 3, 2, 64 * 20, 1e-3, {}),
    ],
    ids=["a-token", "odd", "gate", "without-parts", "model", "p128"],
)
def test_results_are_those_of_float64(sizes, parts, stages, tokens, decay, more):
    laws.is_accurate(by(parts, stages), sizes, tokens, decay, **more)


@pytest.mark.parametrize("chunks", few([WHOLE // 64, 1]))
def test_short_sequences_have_the_bits_of_whole_ones(chunks):
    call = make(SMALL, 2, 64 * chunks - 3) | {"initial_states": -torch.rand(2, 1, 64, 64), "return_final_states": True}
    call["initial_states"][0] = -0.0
    assert all(same(a, b) for a, b in zip(by(3, 4)(**call), emulated(spec=variant(1, 4), **call), strict=True))


def test_packing_changes_no_bit():
    laws.packing_changes_no_bit(by(2, 4), SMALL, (65, 0, WHOLE + 70, 64 * 20))


@pytest.mark.parametrize("state", few([F32, BF16]))
def test_a_pool_is_touched_where_it_should_be(state):
    laws.a_pool_is_touched_where_it_should_be(by(2), SMALL, state)


def test_neighbours_do_not_matter():
    laws.neighbours_do_not_matter(by(2), SMALL, (WHOLE + 1, 70))


def test_a_state_is_overwritten_in_place():
    """The block that has read the state overwrites it."""
    call = make(SMALL, 1, WHOLE + 200, decay=0.01)
    states = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(1))
    out, last = by(3, 4)(**call, initial_states=states, return_final_states=True)
    own = states.clone()
    again, _ = by(3, 4)(**call, initial_states=own, final_states_out=own, return_final_states=True)
    assert same(out, again) and same(last, own)


def test_checkpoints_of_packed_sequences():
    """Each checkpoint is its sequence's state there. The sequence starts after others, and the checkpoints lie in all parts."""
    lengths = (70, 0, WHOLE + 200)
    call = make(SMALL, sum(lengths)) | {"cu_seqlens": laws.starts_of(lengths, "cpu")}
    listed = torch.tensor([1, 70, 71, 300, 70 + WHOLE // 2, 70 + WHOLE, sum(lengths) - 100, sum(lengths)])
    wanted = exact(call, checkpoint_positions=listed, return_checkpoints=True)["checkpoints"]
    _, found = by(2, 4)(**call, checkpoint_positions=listed, return_checkpoints=True)
    assert error(found, wanted) <= BOUNDS[BF16]
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) <= 2 * BOUNDS[BF16], "one of them"


def test_stages_change_no_bit():
    call = make(SMALL, 1, WHOLE + 130) | {"return_final_states": True}
    assert all(same(a, b) for a, b in zip(by(2, 2)(**call), by(2, 4)(**call), strict=True))


@pytest.mark.parametrize("parts", few([3, 2]))
def test_ids_and_checkpoints(parts):
    tokens = WHOLE + 200
    call = make(SMALL, 1, tokens, decay=0.02) | {"initial_states": torch.randn(1, 1, 64, 64)}
    call["seq_idx"] = (torch.arange(tokens) // 150).int()[None]
    listed = torch.tensor(
        [1, 140, 150, 256, 257, WHOLE, WHOLE + 1, WHOLE + 199, tokens]
    )  # of the first part, of the others, and of the last
    more = {"return_final_states": True, "checkpoint_positions": listed, "return_checkpoints": True}
    wanted, found = exact(call, **more), by(parts, 4)(**call, **more)
    for name, own in zip(("out", "final_states", "checkpoints"), found, strict=True):
        assert error(own, wanted[name]) <= BOUNDS[BF16], name
    plain = by(parts, 4)(**call, return_final_states=True)
    assert all(same(a, b) for a, b in zip(found, plain, strict=False)) and same(found[2][-1], found[1][0])


@pytest.mark.parametrize("form", few(["log", "slope"]))
def test_linear_attention(form):
    name, call = attention_cases.make(form, SMALL, 1, WHOLE + 70)
    attention_cases.is_accurate(by(2, function=getattr(ssmgen, name)), call)


@costly(1)
@pytest.mark.parametrize("spec", few([replace(s, ends=True) for s in SPECS if s.parts > 1]), ids=lambda s: s.stem)
def test_variants(spec):
    assert check(spec, SM90, 4).passed
    resources = compiled(spec, SM90).resources
    assert not resources.spills and not resources.stack


def test_bits_are_its_own():
    spec = variant(3)(ScanProblem(headdim=64, d_state=64))
    assert replace(spec, ends=True).order != spec.order
    assert any("ends is yes with parts=1" in words for words in replace(spec, ends=True, parts=1).violations(SM90))


# Mistakes. (text to replace, replacement, words of the finding; off: a result is wrong)
EDITS = {
    "exchanged while products read there": ("meet(1, 128);", "", "has read, with no barrier"),
    "room for copies before it is free": ("if (i + 1 < summed) arrive", "arrive", "thread 384 also writes"),
    "room for copies before it is free, by the first block": ("if (i + 1 != summed) arrive", "arrive", "copies to, and"),
    "room that nobody gets back": ("arrive_together(empty, (summed - 1) % kStages, lane);", "", "nobody ends"),
    "begun before the sums are there": ("cluster_arrive();\n        cluster_wait();\n\n", "", "a peer that may not have begun"),
    "begun before parts are joined": (
        "cluster_arrive();\n        cluster_wait();\n#pragma unroll\n        for (u32 i",
        "#pragma unroll\n        for (u32 i",
        "has read, with no barrier",
    ),
    "preparers that wait for what is not fetched": (
        "&& !met) meet_parts(), met = true;  // before",
        "&& !met) met = false;  // before",
        "nobody ends",
    ),
    "the last part, from the first's end": ("store_4_to_peer(tiles, exchange_of[0] + at, 0, start);", "", "off"),
    "other chunks": ("first_chunk + (i - summed) :", "lead + (i - summed) :", "also writes"),
    "y of other steps": ("y_from = rank ? summed : 0", "y_from = 0", "of written["),
}


@costly(1)
@pytest.mark.parametrize("edit", few(EDITS))
def test_broken_kernels_are_found(edit):
    old, new, words = EDITS[edit]
    with found(words):
        laws.is_accurate(by(3, 4, change=edited(old, new)), SMALL, 64 * 29, 0.01)
