"""The variants of skinny_linear, and which of them serves a call. The size of a call is the sum of its weights' rows, N."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...spec.kernel import SM90, Arch, DType, KernelSpec, Pdl
from ...spec.variants import legal, spec_of
from .problem import SkinnyProblem
from .spec import CHAINS, SLOT, FmaSpec, SkinnySpec, pdls, tiles_of

SIZE, MAX_SIZE = "rows of the weights", 2**18  # the rules compare this size; beyond the maximum, nothing changes
SMS = 132  # of an H100 and an H200
# Measured on an H200 with weights from memory, 1, 8 and 16 rows of x (docs/lab/skinny_linear.md).
HELD = 64  # registers of x: with 128, K = 8192 took 15 % more, and 16 rows of K = 4096 took 19 % more
MOST_SLOTS = 4  # of x in registers where they do not hold a row
MOST_TILES = 5  # of a block at once where a row of x is not held as a whole: 5 % less time than 1 for 16 rows
FMA_ROWS = 16 * SMS  # from here on, warps with two rows still are eight or more per SM
STAGES = {1: (8, 4, 2), 2: (4, 2)}  # by slots; an odd number of 32 KB took 6 % more
# Weights of 8 bits were not measured: copies and stages have as many bytes as the best ones of bf16.
SLOTS = {2: (1, 2), 1: (1, 2, 4)}  # by bytes of a weight; copies of 2 KB took 18 % less than copies of 1 KB


def space(problem: SkinnyProblem, arch: Arch) -> Iterator[KernelSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    found: list[KernelSpec] = []
    for pdl in pdls(arch):
        if problem.x is not DType.F32 and arch >= SM90:
            for tiles, slots, stages, held in product((1, 2, 3, 4, 6), SLOTS[problem.weight.size][-2:], (2, 4, 6, 8), (1, 2, 4)):
                how = {"tiles": tiles, "stages": stages, "slots": slots, "held": held, "joined": min(2, tiles)}
                found.append(spec_of(SkinnySpec, problem, pdl=pdl, **how))
        else:
            for tile, depth, warps in product((1, 2, 4, 8), (1, 2, 4), (4, 8)):
                found.append(spec_of(FmaSpec, problem, tile=tile, depth=depth, warps=warps, pdl=pdl))
    return legal(found, arch)


def fitting(problem: SkinnyProblem, n: int, arch: Arch, pdl: Pdl) -> SkinnySpec | None:
    """The variant with the most stages for which the card has room; None if tensor cores cannot serve the problem.

    If registers hold whole rows of x, a block has one tile at a time: it reads the weights in the order in which they lie in memory.
    Otherwise it has several, so that x is loaded once for all of them.
    """
    if problem.x is DType.F32:
        return None
    size = problem.weight.size
    slots = next((some for some in SLOTS[size] if problem.k <= SLOT * CHAINS * some), SLOTS[size][-1])
    pieces = -(-problem.k // (SLOT * CHAINS * slots))
    held = min(pieces, HELD // (problem.rows * slots))
    tiles = 1 if held == pieces else max(1, min(MOST_TILES, -(-tiles_of(n) // SMS)))
    held = held if held == pieces else MOST_SLOTS // slots
    for stages in STAGES[max(1, slots * size // 2)]:
        how = {"tiles": tiles, "stages": stages, "slots": slots, "held": held, "joined": min(2, tiles)}
        spec = spec_of(SkinnySpec, problem, pdl=pdl, **how)
        if not spec.violations(arch):
            return spec
    return None


def candidates(problem: SkinnyProblem, n: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, KernelSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one applies to every legal problem."""
    when = Pdl.TRIGGER_TOP if pdl else Pdl.OFF
    spec = fitting(problem, n, arch, when)
    yield "tensor-cores", spec, "" if spec else f"they multiply x of bf16 and f16 from sm_90 on, not {problem.x.value} on {arch}"
    yield "fma", spec_of(FmaSpec, problem, tile=2 if n >= FMA_ROWS or problem.gated else 1, depth=4, warps=4, pdl=when), ""
