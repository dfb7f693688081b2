"""The variants of chunk_scan for a problem, and the choice for a call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...spec.kernel import Arch, Pdl
from ...spec.variants import legal, spec_of
from .spec import SMS, ScanProblem, ScanSpec
from .warpgroups import by_warpgroups, warpgroup_space

SIZE, MAX_SIZE = "heads", 2**31 - 1  # the rules compare heads, not sequences, so that bits do not depend on the number of sequences


def space(problem: ScanProblem, arch: Arch) -> Iterator[ScanSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    yield from warpgroup_space(problem, arch)
    blocks = ((0, 1, 1), (0, 1, 2), (0, 4, 1), (1, 1, 1), (1, 4, 1))
    axes = product(range(16, min(problem.headdim, 128) + 1, 16), (1, 2, 3, 4), blocks, Pdl)
    specs = (
        spec_of(ScanSpec, problem, tile=tile, stages=stages, min_blocks=min_blocks, copiers=copiers, parts=parts, pdl=pdl)
        for tile, stages, (copiers, parts, min_blocks), pdl in axes
    )
    yield from legal(specs, arch)


def _parts(problem: ScanProblem, blocks: int, arch: Arch) -> int:
    """The number of blocks that share one sequence, limited by SMs and, to fewer, in a cluster. The cluster size does not depend on the
    number of sequences. More than 6 blocks save very little: the last one passes all chunks."""
    return min(4 if problem.overwrites else 6, SMS.get(arch.number, 80) // blocks)


def candidates(problem: ScanProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ScanSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one needs the least shared memory."""
    wait = Pdl.TRIGGER_LOADED if pdl else Pdl.OFF
    yield from by_warpgroups(problem, size, wait)
    tiles = [t for t in range(16, 129, 16) if problem.headdim % t == 0 and (problem.d_state <= 64 or t <= 64)]
    few = [t for t in tiles if t <= 64]
    tile, narrow = few[-1], 32 if few[-1] % 32 == 0 else 16
    # Four stages give a load the time of a chunk, three give less. Two stages overlap no load with products, and one overlaps nothing: for
    # architectures with little shared memory.
    whole = [(1, tiles[-1], 4), (1, tiles[-1], 3), (1, tile, 3), (1, tile, 2), (1, narrow, 2), (1, narrow, 1), (1, 16, 1)]
    divided = [
        (parts, where, stages)
        for where, stages in ((tile, 4), (tile, 3), (narrow, 3), (narrow, 2))
        if (parts := _parts(problem, size * (problem.headdim // where), arch)) > 1
    ]
    for parts, where, stages in dict.fromkeys(divided + whole):
        words = [*([f"{parts} parts"] if parts > 1 else []), f"tile {where}", "1 stage" if stages == 1 else f"{stages} stages"]
        yield ", ".join(words), spec_of(ScanSpec, problem, tile=where, stages=stages, copiers=int(stages > 2), parts=parts, pdl=wait), ""
