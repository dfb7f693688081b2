"""What chains by warpgroups have in common, on the tensor cores of sm_90a.

A warpgroup fetches, one writes o, and each of the others holds 64 rows of the state in f32, in the registers in which products are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ...spec import Arch, Pdl, must
from .kernels import Chain

ROWS = 64  # of a state, that a warpgroup holds
SMS = 132  # of an H100 or H200
TILES = (64, 128)
# {(tile, K): those of threads that fetch, that write, and that hold the state}. A warpgroup of the last has 64 rows.
REGISTERS = {(64, 64): (56, 88, 240), (64, 128): (56, 88, 240), (128, 64): (56, 56, 200), (128, 128): (48, 32, 216)}


class ByWarpgroups(Chain):
    """The last of a call's kernels, by products of warpgroups."""

    __slots__ = ()
    head_k: int
    copy: int

    @property
    def order(self) -> tuple[str | int, ...]:
        return (self.family,)

    @property
    def threads_per_block(self) -> int:
        return 128 * (2 + self.tile // ROWS)

    @property
    def shared_bytes(self) -> int:
        """Beside those that a launch asks for, barriers, and what it takes to begin at a multiple of 1024."""
        return self.dynamic_bytes + 1024

    def violations(self, arch: Arch) -> list[str]:
        if problems := self.faults():
            return problems
        return [
            *must(str(arch) == "sm_90a", f"products of warpgroups need sm_90a, not {arch}"),
            *must(self.tile in TILES, f"tile {self.tile} is not 64 or 128"),
            *must(self.tile not in TILES or self.head_v % self.tile == 0, f"tile {self.tile} does not divide V {self.head_v}"),
            *must(self.head_k in (64, 128), f"K {self.head_k} is not 64 or 128"),
            *must(self.tile == ROWS or not self.marked, "states at positions, with 128 rows of a block, leave too few registers"),
            *must(self.copy == 16, "q, k, v or out do not begin at multiples of 16 bytes"),
            *must(2 <= self.stages <= 4, f"stages {self.stages} are not 2 … 4"),
            *must(self.min_blocks == 1, f"min_blocks {self.min_blocks} is not 1: roles of warps have registers of their own"),
            *must(self.fetchers == 1, f"fetchers {self.fetchers} is not 1: it is a warpgroup that fetches"),
            *self.common_violations(arch, self.shared_bytes),
        ]

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"registers": REGISTERS[self.tile, self.head_k]}


W = TypeVar("W", bound=ByWarpgroups)


def variants(make: Callable[..., W], arch: Arch) -> Iterator[W]:
    """Every legal variant within the axes worth trying. make: (its choices) -> spec."""
    for tile in TILES:
        for stages in (2, 3, 4):
            for ahead in Pdl:
                spec = make(tile=tile, stages=stages, pdl=Pdl.TRIGGER_LOADED, ahead_pdl=ahead)
                if not spec.violations(arch):
                    yield spec


def rules(make: Callable[..., W], head_v: int, heads: int, wide: tuple[int, ...] = (3, 2)) -> Iterator[tuple[str, W | None, str]]:
    """(rule, spec, ""), best first: 128 rows of a block, with `wide` stages, where 64 make more blocks than there are SMs."""
    tiles = (128, 64) if heads * head_v > SMS * ROWS else (64,)
    for tile in tiles:
        for stages in (3, 2) if tile == ROWS else wide:
            yield f"warpgroups, {tile} rows, {stages} stages", make(tile=tile, stages=stages), ""
