"""Theoretical occupancy, against the toolkit's own calculation."""

from __future__ import annotations

import pytest

from ssmgen.compile.occupancy import LIMITS, occupancy, sm_limits
from ssmgen.errors import UnknownArchError
from ssmgen.spec.kernel import Arch

# (architecture, threads, registers, shared bytes) -> (blocks, limit), as CUDA 13's cuda_occupancy.h computes it, with all of the L1
# that may be shared memory set aside for that.
KNOWN = [
    ("sm_80", 128, 64, 0, 8, "registers"),
    ("sm_80", 256, 32, 16384, 8, "warps"),
    ("sm_80", 32, 32, 0, 32, "blocks"),
    ("sm_80", 256, 40, 0, 6, "registers"),
    ("sm_80", 320, 64, 0, 3, "registers"),
    ("sm_80", 128, 40, 24000, 6, "shared memory"),
    ("sm_86", 32, 16, 0, 16, "blocks"),
    ("sm_87", 128, 32, 9000, 12, "warps"),
    ("sm_89", 128, 40, 0, 12, "warps"),
    ("sm_89", 32, 40, 0, 24, "blocks"),
    ("sm_89", 128, 40, 16384, 5, "shared memory"),
    ("sm_89", 1024, 64, 0, 1, "warps"),
    ("sm_90a", 128, 56, 0, 9, "registers"),
    ("sm_90a", 96, 40, 0, 16, "registers"),
    ("sm_90a", 128, 33, 0, 12, "registers"),
    ("sm_90a", 64, 32, 1000, 32, "blocks"),
    ("sm_90a", 64, 32, 9000, 23, "shared memory"),
    ("sm_90a", 64, 128, 49152, 4, "shared memory"),
    ("sm_90a", 512, 128, 0, 1, "registers"),
    ("sm_90a", 1024, 80, 0, 0, "registers"),
    ("sm_100a", 256, 72, 0, 3, "registers"),
    ("sm_100a", 384, 32, 0, 5, "warps"),
    ("sm_103a", 32, 168, 32768, 6, "shared memory"),
    ("sm_110a", 256, 32, 0, 6, "warps"),
    ("sm_120", 256, 48, 0, 5, "registers"),
    ("sm_120", 64, 64, 4096, 16, "registers"),
    ("sm_120", 64, 64, 9000, 10, "shared memory"),
    ("sm_121", 32, 32, 0, 24, "blocks"),
]


@pytest.mark.parametrize(("arch", "threads", "registers", "shared", "blocks", "limit"), KNOWN)
def test_blocks_and_their_limit_are_the_toolkits(arch, threads, registers, shared, blocks, limit):
    found = occupancy(Arch.parse(arch), threads, registers, shared)
    assert (found.blocks_per_sm, found.limit) == (blocks, limit)
    assert found.warps_per_sm == blocks * -(-threads // 32)


def test_every_architecture_of_the_table_is_tested():
    assert {Arch.parse(arch).number for arch, *_ in KNOWN} == set(LIMITS)


@pytest.mark.parametrize("arch", [Arch(number) for number in LIMITS], ids=str)
def test_more_of_anything_never_leaves_room_for_more_blocks(arch):
    def blocks(threads: int, registers: int, shared: int) -> int:
        return occupancy(arch, threads, registers, shared).blocks_per_sm

    assert blocks(32, 16, 0) == sm_limits(arch).blocks
    for threads in range(32, 1025, 32):
        for registers in (16, 64, 255):
            here = blocks(threads, registers, 4096)
            assert here >= blocks(threads + 32, registers, 4096) and here >= blocks(threads, registers + 8, 4096)
            assert here >= blocks(threads, registers, 4096 + 128) and here * threads <= 32 * sm_limits(arch).warps


@pytest.mark.parametrize(("threads", "registers", "shared"), [(1056, 32, 0), (1024, 72, 0), (32, 256, 0), (32, 32, 228 << 10)])
def test_what_cannot_be_launched_has_no_blocks(threads, registers, shared):
    assert occupancy(Arch.parse("sm_90a"), threads, registers, shared).blocks_per_sm == 0


def test_an_unknown_architecture_is_an_error_that_names_the_known_ones():
    with pytest.raises(UnknownArchError, match=r"sm_75; expected one of sm_80, "):
        occupancy(Arch(75), 128, 32, 0)
