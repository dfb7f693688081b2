"""The row engine: specs and choices for recurrences whose state is a table of rows.

Rows of a recurrent state are independent: row v of head h holds the elements that one read-out sums. `lanes` lanes own
one row, `vec` contiguous elements per lane and pass, and keep `ilp` rows in flight. A long row takes half a warp or a whole warp; a warp
holds several narrow rows. The traffic is twice the state, all else a few per cent: the lower bound is the time of a copy of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, TypeVar

from ..spec.kernel import LATER, SM90, Arch, DType, KernelSpec, Loads, Narrow, Needs, Pdl, Problem, is_pow2, must


class RowProblem(Problem):
    """The properties of a family's problem that the engine reads."""

    __slots__ = ()

    @property
    def heads(self) -> int:
        """Heads of the state."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """Rows per head."""
        raise NotImplementedError

    @property
    def row_elements(self) -> int:
        """Length of a row."""
        raise NotImplementedError

    @property
    def row_dtype(self) -> DType | Narrow:
        raise NotImplementedError

    @property
    def scaled(self) -> bool:
        """Whether every row of the state has a scale."""
        return isinstance(self.row_dtype, Narrow)

    @property
    def row_loads(self) -> Loads:
        raise NotImplementedError

    @property
    def guarded(self) -> bool:
        """Whether rows need element-wise loads and stores. True if a row is not a multiple of 4 elements, the chain that every sum begins
        with, or if interleaved rows do not fill 4-byte words. Elements past the end count as 0."""
        beside = self.interleaved and self.rows * self.row_dtype.size % 4 != 0
        return self.row_elements % 4 != 0 or beside

    @property
    def lanes_per_row(self) -> int | None:
        """Lanes per row, if the kernel prescribes them; else None."""
        return None

    @property
    def layered(self) -> bool:
        """Whether one launch takes the states of several layers."""
        return False

    @property
    def interleaved(self) -> bool:
        """Whether neighbouring rows are contiguous, instead of the elements of a row. 16-byte vectors then hold one element of each of
        `ilp` rows."""
        return False


P = TypeVar("P", bound=RowProblem)
S = TypeVar("S", bound=KernelSpec)
AROUND = ("prefetch", "windows_ahead", "pdl")  # choices that do not change the loop over the rows


@dataclass(frozen=True, kw_only=True)
class RowSpec(KernelSpec, RowProblem):
    """How one variant processes the rows of a problem, which the family's spec also inherits. No choice here changes a bit of the
    result."""

    triggers_first: ClassVar[bool] = True

    lanes: int  # lanes per row; 32 = warp per row, fewer = several rows per warp
    vec: int  # contiguous elements per lane and pass; 16 bytes of state when aligned
    ilp: int = 4  # rows in flight per team of lanes; each lane then owns the scalars of one row
    tile: int = 64  # rows per block
    threads: int = 128
    min_blocks: int = 0  # blocks per SM that ptxas must leave registers for; 0 = its own choice
    prefetch: int = 0  # prefetch the tile of the block this many blocks later into L2; 0 = off
    pdl: Pdl = Pdl.OFF
    # Number of warps that share an interleaved row; partial sums meet in shared memory. Neighbouring lanes then own neighbouring rows, so
    # that a warp reads long contiguous pieces of memory. 0: the lanes of a row are neighbours in one warp.
    row_warps: int = field(default=0, metadata=LATER)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, prefetch=self.prefetch > 0, lines=self.prefetch > 0 and self.scaled)

    @property
    def passes(self) -> int:
        return -(-self.row_elements // (self.lanes * self.vec))

    @property
    def row_room(self) -> int:
        """Elements of a row that fit in its lanes' registers."""
        return self.passes * self.lanes * self.vec

    @property
    def rows_per_step(self) -> int:
        """Rows that a block has in flight at once."""
        return self.threads // self.lanes * self.ilp

    @property
    def tiles(self) -> int:
        """Blocks per head."""
        return -(-self.rows // self.tile)

    @property
    def threads_per_block(self) -> int:
        return self.threads

    @property
    def owned_once(self) -> bool:
        """Whether a lane owns the scalars of one row in all steps together, instead of one row in each step: fewer addresses, loads and
        stores."""
        return False

    @property
    def traffic(self) -> tuple[int, int]:
        row = self.row_elements * self.row_dtype.size
        return min(self.tile, self.rows) * row, self.rows_per_step * row

    def violations(self, arch: Arch) -> list[str]:
        shape = [
            *must(self.row_warps == 0 or is_pow2(self.row_warps), f"row_warps is {self.row_warps}; expected 0 or a power of two"),
            *must(
                is_pow2(self.lanes) and max(1, self.row_warps) <= self.lanes <= 32 * max(1, self.row_warps),
                f"lanes is {self.lanes}; expected a power of two up to "
                f"32{f' for each of {self.row_warps} warps' if self.row_warps else ''}",
            ),
            *must(is_pow2(self.ilp), f"ilp is {self.ilp}; expected a power of two"),
            *must(is_pow2(self.vec), f"vec is {self.vec}; expected a power of two"),
            *must(self.threads % 32 == 0 and 32 <= self.threads <= 1024, f"threads is {self.threads}; expected 32 … 1024 in steps of 32"),
            *must(
                self.min_blocks >= 0 and self.prefetch >= 0,
                f"min_blocks is {self.min_blocks} and prefetch {self.prefetch}; expected 0 or more",
            ),
        ]
        if shape:
            return self.faults() + shape
        n, rows = self.row_elements, self.rows
        vector = self.ilp if self.interleaved else self.vec
        return [
            *self.faults(),
            *must(
                4 <= vector * self.row_dtype.size <= 16,
                f"{'ilp' if self.interleaved else 'vec'} is {vector} of {self.row_dtype.value}; expected 4 … 16 bytes",
            ),
            *must(
                not self.interleaved or self.vec == 4 or self.row_warps > 0,
                f"vec is {self.vec} with interleaved rows; expected 4, the chain of the canonical sum",
            ),
            *must(not self.row_warps or self.interleaved, f"row_warps is {self.row_warps} with contiguous rows; expected 0"),
            *must(not self.row_warps or self.vec in (4, 8), f"vec is {self.vec} with row_warps {self.row_warps}; expected 4 or 8"),
            *must(not self.row_warps or self.ilp % 4 == 0, f"ilp is {self.ilp} with row_warps {self.row_warps}; expected a multiple of 4"),
            *must(
                not self.row_warps or self.threads % (32 * self.row_warps) == 0,
                f"threads is {self.threads}; expected a multiple of 32 x row_warps {self.row_warps}",
            ),
            *must(
                not self.interleaved or self.guarded or rows % self.ilp == 0,
                f"ilp is {self.ilp}; expected a divisor of the {rows} interleaved rows",
            ),
            *must(self.vec >= min(4, n), f"vec is {self.vec}; expected 4 or more, the chain of the canonical sum"),
            *must(
                self.row_room == n if not self.guarded else (self.lanes, self.vec) == guarded_lanes(self),
                f"lanes x vec is {self.lanes} x {self.vec}; expected a divisor of the row's {n} elements"
                if not self.guarded
                else f"lanes and vec are {(self.lanes, self.vec)}; expected {guarded_lanes(self)} for a guarded row of {n}",
            ),
            *must(not self.guarded or self.row_loads is Loads.ELEMENT, "loads of a guarded row are by vectors; expected element"),
            *must(not (self.guarded and self.row_warps), f"row_warps is {self.row_warps} with guarded rows; expected 0"),
            *must(
                self.ilp <= self.lanes, f"ilp is {self.ilp}; expected at most lanes {self.lanes}, since a lane owns the scalars of one row"
            ),
            *must(
                self.tile % self.rows_per_step == 0, f"tile is {self.tile}; expected a multiple of the {self.rows_per_step} rows in flight"
            ),
            *must(
                self.tile < rows + self.rows_per_step,
                f"tile is {self.tile}; expected at most the {rows} rows of a head, rounded up to {self.rows_per_step}",
            ),
            *self.arch_violations(arch),
            *must(arch >= SM90 or not self.prefetch, f"arch is {arch}; expected sm_90 or later, or prefetch=0"),
            *must(
                not self.prefetch or (self.row_loads is Loads.VECTOR and vector * self.row_dtype.size == 16),
                f"prefetch is {self.prefetch} and the state is not loaded as aligned 16-byte vectors; expected 0",
            ),
            *must(
                not self.prefetch or not self.interleaved or self.row_warps > 0,
                f"prefetch is {self.prefetch} with interleaved rows and row_warps=0; expected row_warps, or prefetch=0",
            ),
            *must(
                not self.prefetch or rows % self.tile == 0,
                f"prefetch is {self.prefetch} with tile {self.tile}; expected a tile that divides {rows} rows, or prefetch=0",
            ),
        ]

    def how(self) -> str:
        """The tuning choices, for a name."""
        text = f"l{self.lanes}v{self.vec}i{self.ilp}t{self.tile}x{self.threads}"
        across = [f"w{self.row_warps}"] if self.row_warps else []
        return "_".join([text, *across, *([f"pf{self.prefetch}"] if self.prefetch else []), *([] if self.pdl is Pdl.OFF else ["pdl"])])


def axes(most_vec: int = 8, ahead: int = 264, interleaved: bool = False) -> Iterator[dict[str, Any]]:
    """The choices worth trying, each legal for some problems. The tuner searches them, and tests check that they are bit-equal. ahead:
    distance of the L2 prefetch in blocks, if it is on."""
    tried: dict[str, tuple[Any, ...]] = {
        "lanes": (1, 2, 4, 8, 16, 32),
        "vec": tuple(vec for vec in (2, 4, 8, 16) if vec <= most_vec),
        "ilp": (1, 2, 4, 8),
        "tile": (8, 16, 32, 64, 128, 256),
        "threads": (32, 64, 128, 256),
        "prefetch": (0, ahead),
        "pdl": tuple(Pdl),
        "row_warps": (0, 1, 2, 4, 8) if interleaved else (0,),
    }
    for values in product(*tried.values()):
        how = dict(zip(tried, values, strict=True))
        if how["ilp"] <= how["lanes"] and how["tile"] % (how["threads"] // how["lanes"] * how["ilp"]) == 0:  # half of them
            yield how


def legal(make: Callable[[dict[str, Any]], S], choices: Iterable[dict[str, Any]], arch: Arch) -> Iterator[S]:
    """The legal specs among make(choice), in order. Choices in AROUND only add constraints: if a choice is illegal without them, it is not
    tried with them. This saves seven eighths of the checks."""
    illegal = set()
    for how in choices:
        walk = tuple((name, value) for name, value in how.items() if name not in AROUND)
        if walk in illegal:
            continue
        spec = make(how)
        if not spec.violations(arch):
            yield spec
        elif not how["prefetch"] and how["pdl"] is Pdl.OFF:
            illegal.add(walk)


# ---------------------------------------------------------------------------------------------------------------------------------
# Choosing a variant. Measured on an H200 (132 SMs); docs/performance.md lists the trials.

MOST_ROW_WARPS = 8  # that share a row
MOST_HELD = 96  # elements per lane, for rows that several warps share


@dataclass(frozen=True, slots=True)
class Rule:
    """Serves calls with at most `max_mib` of state traffic (reads and writes). The first rule of a table that fits is taken."""

    name: str
    max_mib: float
    tile_kib: int  # state per block; each thread processes its share of ILP rows at once, and has no other rows
    prefetch: int = 0
    pdl: Pdl = Pdl.TRIGGER_LOADED
    steps: int = 1  # steps in which a block processes its rows
    ilp: int = 4  # 8 needs too many registers, 2 has too few loads in flight on a full card
    piece: int = 0  # bytes of interleaved rows that a warp reads at once, with rows across warps; 0: the lanes of a row are neighbours


def loaded(problem: P) -> P:
    """The problem; if its rows are guarded, state and operands are loaded by elements at any alignment."""
    how: dict[str, Any] = dict.fromkeys(("state_loads", "operand_loads"), Loads.ELEMENT)
    return replace(problem, **how) if problem.guarded else problem


def guarded_lanes(problem: RowProblem) -> tuple[int, int]:
    """(lanes, vec) of guarded rows: 4 elements per lane and pass, and as few lanes as that needs, but at least one for each row of a
    word."""
    lanes = min(32, 1 << (-(-problem.row_elements // 4) - 1).bit_length())
    return (max(lanes, 4 // problem.row_dtype.size) if problem.interleaved else lanes), 4


def layout(problem: RowProblem, ilp: int = 4) -> dict[str, int]:
    """The lane map: 16 bytes of a row per lane, or 32 bytes if the row is longer than 256 bytes. An odd factor of its length goes into
    passes.

    For interleaved rows, a lane holds 4 neighbouring elements, in 16-byte vectors over rows. Few lanes per row give whole sectors, but a
    lane holds at most 64 elements.
    """
    n, size = problem.row_elements, problem.row_dtype.size
    if problem.guarded:
        lanes, vec = guarded_lanes(problem)
        passes = -(-n // (lanes * vec))
        return {"vec": vec, "lanes": lanes, "ilp": 4 // size if problem.interleaved else max(1, min(ilp, lanes, 8 // passes))}
    odd = n // (n & -n)  # 3 for 96
    even = n // odd
    if problem.interleaved:
        together = min(16 // size, problem.rows & -problem.rows)
        lanes = min(32, even // 4)
        while lanes > max(together, 8) and together * n // (lanes // 2) <= 64:
            lanes //= 2
        return {"vec": 4, "lanes": lanes, "ilp": min(together, lanes)}
    vec = min(16 // size, even)
    share = 16 if even * size <= 256 else 32
    lanes = problem.lanes_per_row or max(1, min(32, even * size // share))
    passes = n // (vec * lanes)
    return {"vec": vec, "lanes": lanes, "ilp": min(ilp, lanes) if problem.lanes_per_row else max(1, min(ilp, lanes, 8 // passes))}


def across_warps(problem: RowProblem, piece: int) -> dict[str, int]:
    """The lane map of interleaved rows that several warps share, which read pieces of `piece` bytes. Pieces are smaller if the rows do not
    fill them. Empty if there is no such map. A lane holds 8 neighbouring elements of a row, or 4 if the row is short or needs several
    passes.
    """
    n, together = problem.row_elements, 16 // problem.row_dtype.size
    if not problem.interleaved or problem.row_loads is not Loads.VECTOR:
        return {}
    odd = n // (n & -n)
    for teams in (t for t in (16, 8, 4) if 16 * t <= piece):
        in_warp = 32 // teams
        vec = 8 if odd == 1 and n >= 8 * in_warp else 4
        lanes = n // odd // vec
        held = together * n // lanes
        if problem.rows % (teams * together) == 0 and max(in_warp, together) <= lanes <= MOST_ROW_WARPS * in_warp and held <= MOST_HELD:
            return {"vec": vec, "lanes": lanes, "ilp": together, "row_warps": lanes // in_warp}
    return {}


def fit(problem: RowProblem, rule: Rule) -> dict[str, int]:
    """Lanes, rows and threads for a problem: about tile_kib per block. The number of warps divides the rows if a near one does."""
    chosen = across_warps(problem, rule.piece) or layout(problem, rule.ilp)
    together = chosen.get("row_warps", 1)  # warps of a group
    rows = 32 * together // chosen["lanes"] * chosen["ilp"]  # rows per group
    row_bytes = problem.row_elements * problem.row_dtype.size
    most = max(1, min(8 // together, rule.tile_kib * 1024 // (row_bytes * rows), -(-problem.rows // rows)))
    fitting = [n for n in range(most * 3 // 2, most // 2, -1) if problem.rows % (n * rows) == 0]
    groups = most if most in fitting or not fitting else fitting[0]
    steps = rule.steps if groups % rule.steps == 0 else 1
    return chosen | {"threads": 32 * together * groups // steps, "tile": groups * rows}


def choices(
    problem: RowProblem, rules: Sequence[Rule], batch: int, arch: Arch, pdl: bool
) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """(rule, how or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    mib = 2 * batch * problem.heads * problem.rows * problem.row_elements * problem.row_dtype.size / 2**20
    taken = False
    for rule in rules:
        if taken or mib > rule.max_mib:
            reason = "an earlier rule applies" if taken else f"the state traffic is {mib:.1f} MiB; the rule is for at most {rule.max_mib:g}"
            yield rule.name, None, reason
            continue
        taken = True
        how = fit(problem, rule)
        vector = how["ilp"] if problem.interleaved else how["vec"]
        aligned = problem.row_loads is Loads.VECTOR and vector * problem.row_dtype.size == 16
        whole = problem.rows % how["tile"] == 0 and (not problem.interleaved or how.get("row_warps", 0) > 0)
        prefetch = rule.prefetch if aligned and whole and arch >= SM90 else 0
        yield rule.name, how | {"prefetch": prefetch, "pdl": rule.pdl if pdl else Pdl.OFF}, ""
    how = layout(problem)
    how |= {} if problem.interleaved else {"ilp": 1}
    warps = max(1, min(4, problem.rows * how["lanes"] // (32 * how["ilp"])))
    how |= {"threads": 32 * warps, "tile": 32 * warps // how["lanes"] * how["ilp"]}
    yield "generic", how | {"pdl": Pdl.TRIGGER_LOADED if pdl else Pdl.OFF}, ""
