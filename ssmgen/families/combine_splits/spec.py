"""combine_splits: merges partial attention outputs of split-KV decoding by their log-sum-exps.

A unit of threads owns some neighbouring columns of one row of the output: `lanes` lanes hold `vec` columns each, and `parts` such teams
share the splits. Each of its warps reads all of the row's LSEs, lanes over splits, while its first vectors are loading. Bytes per
row: splits * (d_v * sizeof(o) + 4) read, d_v * sizeof(out) + 4 written.

The sum has one order. Split s belongs to chain s % CHAINS; a chain is a run of fused multiply-adds in ascending order, and chains are added
in pairs at distance 4, 2 and 1. The weights are summed in 32 such chains, over s % 32, then in pairs at distance 16, 8, 4, 2 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...spec.kernel import Arch, DType, Index, KernelSpec, Loads, Needs, Param, Pdl, Problem, is_pow2, must
from ...spec.variants import legal, spec_of
from .operands import OPERANDS

OPERATOR = "combine_splits"
SIZE, MAX_SIZE = "rows", 2**17  # the rules compare this size; beyond the maximum, nothing changes

MAX_D_V = 1024
CHAINS = 8  # chains that splits are summed in, in every variant
BOUNDS = (2, 4, 8, 16, 32, 64, 96, 128, 160)  # splits per row that kernels are made for; 0: any number
AXES = ("outer", "middle", "inner")


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineProblem(Problem):
    """The fields that a call fixes. Other sizes than d_v, and bases of logarithms, are not fixed."""

    d_v: int
    o: DType = DType.F32
    out: DType = DType.BF16
    max_splits: int = 32  # per row; 0: any number
    axes: int = 1  # of rows, after the merge that strides allow
    pair: bool = False  # the two splits are separate tensors
    num_splits: Index = Index.NONE  # its type; it holds the first split of each entry of the outer axis
    sink: DType | None = None
    mask: bool = False
    lse_out: bool = True
    skip_single: bool = False
    in_place: bool = False  # lse_out is also an input
    loads: Loads = Loads.VECTOR  # o and out: aligned to the widest vector that divides d_v

    @property
    def widest(self) -> int:
        """Columns per access, at most."""
        return 16 // self.o.size if self.loads is Loads.VECTOR and self.d_v % (16 // self.o.size) == 0 else 4

    @property
    def partial(self) -> bool:
        """Whether the last vector of a row is partial: o and out are then loaded and stored element by element."""
        return self.d_v % 4 != 0

    @property
    def apart(self) -> bool:
        """Whether rows have several axes."""
        return self.axes > 1

    @property
    def three(self) -> bool:
        return self.axes == len(AXES)

    @property
    def indexed(self) -> bool:
        return self.num_splits is not Index.NONE

    def faults(self) -> list[str]:
        """Reasons why no variant can serve this problem."""
        return [
            *must(1 <= self.d_v <= MAX_D_V, f"d_v is {self.d_v}; expected 1 … {MAX_D_V}"),
            *must(
                not self.partial or self.loads is Loads.ELEMENT,
                f"loads is {self.loads.value} with d_v {self.d_v}, no multiple of 4; expected element",
            ),
            *must(
                self.max_splits in (0, *BOUNDS),
                f"max_splits is {self.max_splits}; expected one of {', '.join(map(str, BOUNDS))}, or 0 for any number",
            ),
            *must(1 <= self.axes <= len(AXES), f"axes is {self.axes}; expected 1 … {len(AXES)}"),
            *must(not self.pair or self.max_splits == 2, f"pair is yes and max_splits is {self.max_splits}; expected 2"),
            *must(not (self.pair and self.indexed), f"pair is yes and num_splits is {self.num_splits.value}; expected none"),
            *must(not self.skip_single or self.indexed, "skip_single is yes and num_splits is none; expected num_splits"),
            *must(not self.in_place or (self.pair and self.lse_out), "in_place is yes without a pair and its lse_out; expected both"),
        ]


@dataclass(frozen=True, kw_only=True)
class CombineSpec(KernelSpec, CombineProblem):
    """A problem, and how one variant computes it. No choice here changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "combine_splits/combine_splits.cu.j2"
    table: ClassVar[Any] = OPERANDS

    vec: int  # columns per lane
    lanes: int = 32  # of a team
    parts: int = 1  # teams that share a row's splits
    ilp: int = 1  # splits of a chain that are in flight
    threads: int = 128
    min_blocks: int = 0  # blocks per SM that ptxas must leave registers for; 0 = its own choice
    pdl: Pdl = Pdl.OFF

    @property
    def unit(self) -> int:
        """Threads that own some columns of a row."""
        return self.lanes * self.parts

    @property
    def tiles(self) -> int:
        """Units of a row."""
        return -(-self.d_v // (self.lanes * self.vec))

    @property
    def span(self) -> int:
        """Splits of a row in flight at once."""
        return CHAINS * self.ilp

    @property
    def loops(self) -> bool:
        """Whether rows may have more splits than that."""
        return not self.max_splits or self.max_splits > self.span

    @property
    def needs(self) -> Needs:
        return replace(super().needs, bytes=self.mask, guarded=self.partial)

    @property
    def threads_per_block(self) -> int:
        return self.threads

    @property
    def stem(self) -> str:
        how = f"v{self.vec}l{self.lanes}p{self.parts}i{self.ilp}x{self.threads}{'' if self.pdl is Pdl.OFF else '_pdl'}"
        form = "pair" if self.pair else f"{'prefix' if self.indexed else 'dense'}{self.max_splits or ''}"
        return f"combine_{form}_d{self.d_v}_{self.o.value}_{self.out.value}_{how}"

    def violations(self, arch: Arch) -> list[str]:
        sizes = {"vec": self.vec, "lanes": self.lanes, "parts": self.parts, "ilp": self.ilp}
        odd = [f"{name} is {n}" for name, n in sizes.items() if not is_pow2(n)]
        if odd or self.max_splits not in (0, *BOUNDS):
            return [*self.faults(), *must(not odd, f"{', '.join(odd)}; expected a power of two for each")]
        # Threads that exit together: all threads of a row, if they meet at a barrier.
        together = self.unit * (self.tiles if self.in_place else 1)
        meets = self.unit > 32 or (self.in_place and self.tiles > 1)
        return [
            *self.faults(),
            *must(self.threads % 32 == 0 and 32 <= self.threads <= 1024, f"threads is {self.threads}; expected 32 … 1024 in steps of 32"),
            *must(self.threads % self.unit == 0, f"threads is {self.threads}; expected a multiple of lanes x parts = {self.unit}"),
            *must(not meets or self.threads == together, f"threads is {self.threads}; expected {together}, as many as meet at a barrier"),
            *must(self.vec in (4, self.widest), f"vec is {self.vec}; expected 4 or {self.widest}"),
            *must(self.lanes <= 32, f"lanes is {self.lanes}; expected at most 32"),
            *must(self.parts <= CHAINS, f"parts is {self.parts}; expected at most {CHAINS}"),
            *must(self.ilp <= 4, f"ilp is {self.ilp}; expected at most 4, since lanes hold the weights of 32 splits"),
            *must(
                self.unit >= 32 or not self.loops,
                f"lanes x parts is {self.unit} for any number of splits; "
                f"expected 32 or more: fewer threads hold at most {self.span} splits",
            ),
            *self.arch_violations(arch),
        ]

    def row_axes(self) -> tuple[str, ...]:
        return {1: AXES[:1], 2: AXES[::2], 3: AXES}[self.axes]

    def strides(self) -> list[tuple[str, str]]:
        """(operand, axis) of every stride the kernel takes, in elements."""
        return [(operand, axis) for operand, axis, _ in OPERANDS.strides(self)]

    def parameters(self) -> list[Param]:
        divisors = [p for axis in self.row_axes()[1:] for p in Param.divisor(f"{axis}_size")]
        counts = ["rows", *([] if self.pair else ["splits"])]
        numbers = ["to_log2", *(["sink_to_base"] if self.sink else [])]
        numbers += ["max_to_out", "log2_to_out", "empty_lse"] if self.lse_out else []
        return [*OPERANDS.pointers(self), *divisors, *map(Param.u32, counts), *OPERANDS.stride_params(self), *map(Param.f32, numbers)]

    def _offsets(self) -> dict[str, str]:
        """Offsets from the operands to a row, and within the row to a lane's columns."""
        terms: dict[str, list[str]] = {operand: [] for operand in self.operands() if operand != "num_splits"}
        for operand, axis in self.strides():
            if operand in terms and axis != "split":
                terms[operand].append(f"u64({axis}) * {operand}_{axis}")
        for operand in {"o", "o_other", "out"} & terms.keys():
            terms[operand].append("column")
        return {operand: " + ".join(sums) for operand, sums in terms.items() if sums}

    def constants(self) -> dict[str, Any]:
        scan = min(32, self.unit, max(self.parts, _pow2(self.max_splits or 32)))  # if there are few splits, several lanes read each
        return {
            "chains": CHAINS,
            "scan": scan,
            "held": -(-min(self.max_splits or 32, 160) // scan),
            # Splits at a distance of one step belong to one team; splits beyond max_splits belong to none.
            "team_chains": -(-min(CHAINS, self.max_splits or CHAINS) // self.parts),
            "beyond": not self.max_splits,
            "vector": self.loads is Loads.VECTOR,
            "whole": self.d_v % (self.lanes * self.vec) == 0,
            "warps": max(1, self.unit // 32),
            "offsets": self._offsets(),
            "meets": self.in_place and self.tiles > 1 and self.unit <= 32,
        }


def bound_of(splits: int) -> int:
    """The least bound that covers `splits`."""
    return next((b for b in BOUNDS if splits <= b), 0)


def _pow2(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << (n - 1).bit_length()


def _shape(problem: CombineProblem, parts: int, vec: int = 0, ilp: int = 0, **how: Any) -> CombineSpec:
    """The variant with `parts` parts, or the nearest useful number of them."""
    vec = vec or problem.widest
    lanes = min(32, _pow2(-(-problem.d_v // vec)))
    most = problem.max_splits or 2**31
    least = 32 // lanes if most > CHAINS else 1  # threads of a warp that stay together in a loop
    lanes = max(lanes, 32 // CHAINS) if most > CHAINS else lanes
    parts = max(min(parts, CHAINS, most), min(least, CHAINS))
    tiles = -(-problem.d_v // (lanes * vec))
    if problem.in_place and tiles > 1:
        parts = min(parts, 1024 // (tiles * lanes))
    deep = 2 if vec == 4 and problem.max_splits else 1  # with wider vectors, and in the loop, two per thread would spill
    ilp = ilp or min(4, max(deep, parts), _pow2(-(-most // CHAINS)))
    unit = lanes * parts
    meets = unit * (tiles if problem.in_place else 1) if unit > 32 or (problem.in_place and tiles > 1) else 0
    return spec_of(CombineSpec, problem, vec=vec, lanes=lanes, parts=parts, ilp=ilp, threads=meets or 128, **how)


def space(problem: CombineProblem, arch: Arch) -> Iterator[CombineSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    found: dict[CombineSpec, None] = {}
    for vec in sorted({4, problem.widest}):
        for parts in (1, 2, 4, 8):
            for ilp in (1, 2, 4):
                for pdl in (Pdl.OFF, Pdl.WAIT, Pdl.TRIGGER_TOP, Pdl.TRIGGER_LOADED):
                    found.setdefault(_shape(problem, parts, vec, ilp, pdl=pdl))
    return legal(found, arch)


def candidates(problem: CombineProblem, rows: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, CombineSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one applies to every legal problem."""
    quads, splits = rows * -(-problem.d_v // 4), problem.max_splits or 2**31
    # Two teams per row and an early start of dependents: 3 % less on an H100, the same on an H200. 4-byte elements: one team, later start.
    two = problem.o.size == 2 and SMALL < quads <= NARROW and 2 * LEAST <= splits <= FEW
    quick = splits <= 2 or (splits <= FEW and quads <= SMALL) or two  # then dependents wait little
    how: dict[str, Any] = {"pdl": Pdl.OFF if not pdl else Pdl.TRIGGER_TOP if quick else Pdl.TRIGGER_LOADED}
    if quads <= NARROW and problem.max_splits and problem.widest > 4:
        how["vec"] = 4  # a lane has fewer columns, and a row more lanes
    for rule, limit, parts, least in FILL:
        if quads > limit:
            yield rule, None, f"{rows} rows of {quads // rows} times 4 columns are above {limit}"
        elif splits < least:
            yield rule, None, f"{splits} splits are below {least}"
        else:
            halves = splits == 2 and quads <= TINY and problem.d_v <= 16 * problem.widest  # halves of a warp do not wait for each other
            both = splits == 2 and TINY < quads <= FILL[0][1]
            more: dict[str, Any] = {"vec": problem.widest} if halves else {}
            if problem.max_splits > 32:
                early = quads > LONE and not problem.indexed
                more |= WALKED[problem.o.size] if least > 1 else {"pdl": Pdl.TRIGGER_TOP} if early else {}
                more |= {} if pdl else {"pdl": Pdl.OFF}
            yield rule, _shape(problem, 2 if both or halves else min(parts, max(1, splits // LEAST)), **how | more), ""
    if splits == 2 and how.get("vec", problem.widest) == 4 and not problem.pair:
        how["ilp"] = 4  # 1.5 % faster than 1, for an unknown reason
    fewest = 32 // min(32, _pow2(-(-problem.d_v // how.get("vec", problem.widest))))  # whole warps per row
    yield "whole-warps", _shape(problem, 2 if two else min(fewest, max(1, splits // LEAST)), **how), ""


# (rule; quads of output columns, at most; teams that share a row's splits; splits, at least): enough teams to keep every SM loading. LEAST:
# splits that a team should have, if there are more than two. Measured on an H100 and an H200; docs/performance.md.
FILL = (("parts-8", 2**12, 8, 1), ("parts-4", 2**13, 4, 1), ("parts-4-of-many", 2**15, 4, 32))
LEAST = 4
NARROW, SMALL, FEW = 2**15, 2**14, 16  # quads of columns; and splits
TINY = 2**10  # quads of columns, up to which one team has both of two splits: two teams of one warp each would wait for each other
# Rows with more splits than a thread holds at once: an early start of dependents takes 3 … 5 % less above LONE quads of columns, and 2 … 5
# % more below (measured without num_splits). The third rule depends on the bytes of an element: with 4 in flight and dependents that start
# when all is loaded, such rows took 25 % and 21 % more.
LONE = 2**11
WALKED: dict[int, dict[str, Any]] = {4: {"ilp": 2}, 2: {"pdl": Pdl.TRIGGER_TOP}}
