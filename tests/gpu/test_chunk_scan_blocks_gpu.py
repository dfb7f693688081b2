"""chunk_scan by warpgroups on a card, by its newer forms: blocks that stay, and one that has both ends of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import scan_cases as laws
import torch
from repeats import others_in_graphs
from scan_cases import F32, SM90, Sizes, make, same, starts_of

from ssmgen.families.chunk_scan.spec import OPERATOR, ScanProblem
from ssmgen.families.chunk_scan.warpgroups import WarpgroupScanSpec
from ssmgen.select.registry import select

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]

PARTS = {32: 3, 24: 4, 16: 6, 8: 8}  # by heads: how many blocks divide a sequence
STAY = (128, 48)  # heads
of_parts = pytest.mark.parametrize("heads", PARTS)
of_both = pytest.mark.parametrize("heads", (*STAY, *PARTS))


def sizes_of(heads: int) -> Sizes:
    return Sizes(heads=heads, groups=8, headdim=64, d_state=128, device="cuda")


def variant(heads: int, new: bool = True) -> Callable[[ScanProblem], WarpgroupScanSpec]:
    def of(problem: ScanProblem) -> WarpgroupScanSpec:
        spec = select(OPERATOR, problem, heads, SM90, True)
        assert isinstance(spec, WarpgroupScanSpec) and spec.parts == PARTS.get(heads, 1)
        return replace(spec, ends=new and spec.parts > 1, stays=new and spec.parts == 1)

    return of


def by(heads: int, new: bool = True, **more: Any) -> laws.Scan:
    return partial(laws.launched, spec=variant(heads, new), **more)


@pytest.mark.parametrize("lengths", [(2048,) * 5, (64, 3000, 1, 0, 700, 128, 2000, 65) * 5], ids=["alike", "others"])
@pytest.mark.parametrize("heads", STAY)
def test_blocks_that_stay_change_no_bit(heads, lengths):
    """This includes 40 sequences, which are examined 32 at a time."""
    call = make(sizes_of(heads), sum(lengths)) | {"cu_seqlens": starts_of(lengths, "cuda")}
    call["initial_states"] = torch.randn(len(lengths), heads, 64, 128, device="cuda")
    found, wanted = (by(heads, new)(**call, return_final_states=True) for new in (True, False))
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


@of_both
@pytest.mark.parametrize("decay", [1e-3, 16.0])
def test_long_and_short_memories(heads, decay):
    laws.is_accurate(by(heads), sizes_of(heads), 4100, decay, z=True, step=3.0 if decay > 1 else 0.0)


@of_parts
def test_lengths(heads):
    laws.lengths_are_accurate(by(heads), sizes_of(heads), (1, 64, 700, 704, 768, 769, 833, 1025, 1500, 2049))


@of_both
def test_packing_changes_no_bit(heads):
    laws.packing_changes_no_bit(by(heads), sizes_of(heads), (*laws.LENGTHS, 768, 769, 1500))


@of_both
def test_a_pool_is_touched_where_it_should_be(heads):
    laws.a_pool_is_touched_where_it_should_be(by(heads), sizes_of(heads), F32)


@of_both
def test_the_same_bits_ten_thousand_times(heads):
    """Runs in graphs, with more sequences than SMs."""
    assert not others_in_graphs(by(heads), make(sizes_of(heads), 3, 1100))
