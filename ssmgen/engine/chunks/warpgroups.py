"""Registers, tiles and rules of chains by warpgroups, on the tensor cores of sm_90a.

One warpgroup loads, one writes o, and each of the others holds 64 rows of the state in f32, in the accumulator registers of products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import TypeVar

from ...spec.kernel import Arch, KernelSpec, Pdl
from ...spec.variants import legal

ROWS = 64  # state rows per warpgroup
SMS = 132  # of an H100 or H200
TILES = (64, 128)
# {(tile, K): registers of threads that load, that write, and that hold the state}. Each warpgroup with state has 64 rows.
SUMMING = (40, 0, 232)
REGISTERS = {(64, 64): (56, 88, 240), (64, 128): (56, 88, 240), (128, 64): (56, 56, 200), (128, 128): (48, 32, 216)}


def registers(tile: int, head_k: int, sums: bool) -> tuple[int, int, int]:
    """Registers of a thread that loads, that writes o, and that holds the state; kernels with sums have no writers."""
    return SUMMING if sums else REGISTERS[tile, head_k]


W = TypeVar("W", bound=KernelSpec)


def variants(make: Callable[..., W], arch: Arch) -> Iterator[W]:
    """Every legal variant within the axes worth trying. make: (its choices) -> spec."""
    axes = product(TILES, (2, 3, 4), Pdl)
    return legal((make(tile=tile, stages=stages, pdl=Pdl.TRIGGER_LOADED, ahead_pdl=ahead) for tile, stages, ahead in axes), arch)


def rules(make: Callable[..., W], head_v: int, heads: int, wide: tuple[int, ...] = (3, 2)) -> Iterator[tuple[str, W | None, str]]:
    """(rule, spec, ""), best first: 128 rows per block, with `wide` stages, if 64 rows would make more blocks than there are SMs."""
    tiles = (128, 64) if heads * head_v > SMS * ROWS else (64,)
    for tile in tiles:
        for stages in (3, 2) if tile == ROWS else wide:
            yield f"warpgroups, {tile} rows, {stages} stages", make(tile=tile, stages=stages), ""
