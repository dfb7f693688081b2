"""The variants of skinny_linear, and which of them serves a call. The size of a call is the sum of its weights' rows, N."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.kernel import Arch, DType, KernelSpec, Pdl
from .fma import FmaSpec
from .problem import SkinnyProblem
from .spec import SkinnySpec, of, pdls, tiles_of

SIZE, MAX_SIZE = "rows of the weights", 2**18  # the rules compare this size; beyond the maximum, nothing changes
SMS = 132  # of an H100 and an H200
MOST_TILES = {8: 10, 16: 8}  # of a block at once, by rows of x
STAGES = (11, 9, 8, 6, 4, 3, 2)  # the first that fits is chosen


def space(problem: SkinnyProblem, arch: Arch) -> Iterator[KernelSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    found: list[KernelSpec] = []
    for pdl in pdls(arch):
        if problem.x is not DType.F32:
            for tiles in (1, 2, 3, 4, 6, 8, 9, 10):
                for stages in (12, 10, 8, 6, 4):
                    for held in (1, 2, 4, 8):
                        for slots in (1, 2):
                            found += [
                                of(SkinnySpec, problem, tiles=tiles, stages=stages, held=held, slots=slots, joined=min(2, tiles), pdl=pdl)
                            ]
        else:
            for tile in (1, 2, 4, 8):
                for depth in (1, 2, 4):
                    for warps in (4, 8):
                        found += [of(FmaSpec, problem, tile=tile, depth=depth, warps=warps, pdl=pdl)]
    yield from (spec for spec in found if not spec.violations(arch))


def fitting(problem: SkinnyProblem, n: int, arch: Arch, pdl: Pdl) -> SkinnySpec | None:
    """The variant with the most tiles at once that leaves room for stages in flight; None if tensor cores cannot serve the problem.

    A block holds about 64 registers of x. About 16 products of a piece and a tile are in the code: more would not stay in the caches.
    """
    each = -(-tiles_of(n) // SMS)
    turns = -(-each // MOST_TILES[problem.rows])
    for least in (4, 2):
        for tiles in range(-(-each // turns), 0, -1):
            held = min(64 // problem.rows, max(2, 16 // tiles), -(-problem.k // 512))
            for stages in (many for many in STAGES if many >= least):
                spec: SkinnySpec = of(SkinnySpec, problem, tiles=tiles, stages=stages, held=held, joined=min(2, tiles), pdl=pdl)
                if not spec.violations(arch):
                    return spec
    return None


def candidates(problem: SkinnyProblem, n: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, KernelSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one applies to every legal problem."""
    when = Pdl.TRIGGER_LOADED if pdl else Pdl.OFF
    spec = fitting(problem, n, arch, when)
    yield "tensor-cores", spec, "" if spec else f"they multiply bf16 and f16 from sm_90 on, not {problem.x.value} on {arch}"
    tile = 4 if n >= 4 * 4 * SMS else 2 if n >= 2 * 4 * SMS else 1
    yield "fma", of(FmaSpec, problem, tile=tile, depth=4 if tile < 4 else 2, warps=4, pdl=when), ""
