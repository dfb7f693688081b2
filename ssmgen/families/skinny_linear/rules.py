"""The variants of skinny_linear, and which of them serves a call. The size of a call is the sum of its weights' rows, N."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...spec.kernel import SM90, Arch, DType, KernelSpec, Loads, Pdl
from ...spec.variants import legal, spec_of
from .problem import SkinnyProblem
from .spec import CHAINS, SLOT, FmaSpec, SkinnySpec, pdls, tiles_of

SIZE, MAX_SIZE = "rows of the weights", 2**18  # the rules compare this size; beyond the maximum, nothing changes
SMS = 132  # of an H100 and an H200
# Measured on an H200 with weights from memory, 1, 8 and 16 rows of x, all linear layers of 25 models (docs/lab/skinny_linear.md).
# Registers of x: with 128, K = 8192 took 15 % more, and 16 rows of K = 4096 took 19 % more. 112 spill if x is normed or loaded by elements.
HELD, HELD_BESIDE = 112, 96
MOST_SLOTS = 4  # of x in registers if they do not hold a row
MOST_TILES = {8: 2, 16: 6}  # of a block at once if registers do not hold a row of x, by rows
MOST_NARROW_TILES = 3  # of weights of 8 bits: more spill on sm_100a and sm_120a
LIGHT_TILES = 4  # from here on, 16 rows of x take the registers of one piece: two pieces took up to 3 % more
FMA_ROWS = 16 * SMS  # from here on, warps with two rows still are eight or more per SM
STAGES = {1: (8, 4, 2), 2: (4, 2)}  # by slots; an odd number of 32 KB took 6 % more
# Rows that one piece holds have short tiles: two blocks per SM hide each other's joins, 15 to 40 % less time than one block.
SHORT = SLOT * CHAINS
SHORT_TILES, SHORT_STAGES = {8: 2, 16: 1}, 6
# Heads of models, up to 8 rows of x: two stages took 4 to 14 % less time than four. Smaller weights take up to 2 % more with two.
BIG_BYTES, BIG_STAGES = 400e6, 2
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
    """The first variant for which the card has room; None if tensor cores cannot serve the problem."""
    if problem.x is DType.F32:
        return None
    specs = (spec_of(SkinnySpec, problem, pdl=pdl, **how) for how in _forms(problem, n))
    return next((spec for spec in specs if not spec.violations(arch)), None)


def _forms(problem: SkinnyProblem, n: int) -> Iterator[dict[str, int]]:
    """The rules' choices for tensor cores, the best first.

    If registers hold whole rows of x, a block has one tile at a time: it reads the weights in the order in which they lie in memory.
    Otherwise it has several, so that x is loaded once for all of them, and all blocks have about equally many.
    """
    size, rows, of_block = problem.weight.size, problem.rows, -(-tiles_of(n) // SMS)
    if problem.k <= SHORT:
        tiles = min(SHORT_TILES[rows], of_block)
        yield {"tiles": tiles, "stages": SHORT_STAGES, "slots": 1, "held": 1, "joined": tiles, "min_blocks": 2}
    slots = next((some for some in SLOTS[size] if problem.k <= SHORT * some), SLOTS[size][-1])
    pieces = -(-problem.k // (SHORT * slots))
    room = HELD if problem.loads is Loads.VECTOR and not problem.norm else HELD_BESIDE
    if pieces * slots * rows <= room:
        tiles, held = 1, pieces
    elif rows == 8:
        tiles, held = min(MOST_TILES[rows], of_block), MOST_SLOTS // slots
    else:
        groups = -(-of_block // (MOST_NARROW_TILES if problem.narrow else MOST_TILES[rows]))
        tiles = -(-of_block // groups)
        held = 1 if tiles >= LIGHT_TILES else MOST_SLOTS // slots
    big = rows == 8 and n * problem.k * size >= BIG_BYTES
    for stages in STAGES[max(1, slots * size // 2)]:
        if not big or stages == BIG_STAGES:
            yield {"tiles": tiles, "stages": stages, "slots": slots, "held": held, "joined": min(2, tiles)}


def candidates(problem: SkinnyProblem, n: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, KernelSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one applies to every legal problem."""
    when = Pdl.TRIGGER_TOP if pdl else Pdl.OFF
    spec = fitting(problem, n, arch, when)
    yield "tensor-cores", spec, "" if spec else f"they multiply x of bf16 and f16 from sm_90 on, not {problem.x.value} on {arch}"
    yield "fma", spec_of(FmaSpec, problem, tile=2 if n >= FMA_ROWS or problem.gated else 1, depth=4, warps=4, pdl=when), ""
