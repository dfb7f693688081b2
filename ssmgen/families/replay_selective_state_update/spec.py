"""replay_selective_state_update: Mamba-2 on several tokens; the next step keeps a prefix of them (speculative decoding).

The pool holds a state per slot, and its history: the inputs of the tokens after the state. K of these inputs are valid. s is the running
sum of dt A over the history and over the T new tokens, and S the state:

    S' = exp(s_K) S + sum_k exp(s_K - s_k) dt_k x_k B_k             k < K; written if the history is emptied
    out_t = exp(s_t) C_t S' + sum_j exp(s_t - s_j) dt_j (C_t B_j) x_j + D x_t           j <= t

The states of new tokens are never computed. `mix` [T, K + T] multiplies the tokens' x. Like all products with B or C it comes from the
tensor cores, which take numbers as exact sums of bf16 terms, three for an f32 state. Memory traffic is mostly the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd
from typing import Any, ClassVar

from ...spec.kernel import FP8, LATER, SM90, Arch, DType, Index, Loads, Narrow, Needs, Pdl, must
from ...spec.variants import spec_of, trials
from .operands import LATE
from .problem import History, ReplayArguments, ReplayProblem
from .problem import Part as Part

OPERATOR = "replay_selective_state_update"


@dataclass(frozen=True, kw_only=True)
class ReplaySpec(ReplayArguments):
    """A problem, and how one variant computes it. No choice here changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "replay_selective_state_update/replay_selective_state_update.cu.j2"

    warps: int = 4  # of 16 rows each
    helpers: int = 0  # warps that do all work except the rows, whose warps then have less to do; 0 = each warp does its part of all work
    group_heads: int = 1  # PRECOMPUTE, and by_group: heads of a group per block
    min_blocks: int = 0  # blocks per SM that ptxas must leave registers for; 0 = its own choice
    prefetch: int = 0  # ask L2 for the tile of the block this many blocks ahead; 0 = off
    pdl: Pdl = Pdl.OFF
    ahead_pdl: Pdl = Pdl.OFF  # MAIN: PDL of the first kernel
    by_group: bool = field(default=False, metadata=LATER)  # a block computes the shared part of a group's heads once, then loops over heads
    prefetch_inputs: bool = field(default=False, metadata=LATER)  # also prefetches that block's other inputs into L2

    @property
    def needs(self) -> Needs:
        narrow = self.scaled and self.part is not Part.PRECOMPUTE
        by_byte = self.caches or (narrow and self.state.size == 1 and self.state_loads is Loads.ELEMENT)
        ahead = self.prefetch > 0
        lines = ahead and (narrow or self.prefetch_inputs)
        needs = replace(super().needs, matrix_turns=self.by_group, mma="bf16")
        return replace(needs, prefetch=ahead, lines=lines, narrow=narrow, bytes=by_byte)

    @property
    def tile(self) -> int:
        """Rows of headdim per block."""
        return 16 * self.warps

    @property
    def tiles(self) -> int:
        """Blocks per head; per sequence of PRECOMPUTE, groups of heads."""
        return -(-self.headdim // self.tile)

    @property
    def blocks(self) -> int:
        """Blocks per sequence."""
        return self.nheads // self.group_heads if self.part is Part.PRECOMPUTE or self.by_group else self.nheads * self.tiles

    @property
    def threads_per_block(self) -> int:
        return 32 * (self.warps + self.helpers)

    @property
    def traffic(self) -> tuple[int, int]:
        tile = min(self.tile, self.headdim) * self.d_state * self.state.size
        heads = self.group_heads if self.by_group else 1
        return tile * heads, tile * heads

    @property
    def entries(self) -> int:
        """Rows of x that the outputs sum over: the history, then the tokens."""
        return self.window + (0 if self.materialize else self.tokens)

    @property
    def vec(self) -> int:
        """Elements of the state in 16 bytes, or in 8 bytes if they have 8 bits: the other layouts are then the same as with 16 bits."""
        return 16 // max(2, self.state.size)

    @property
    def stem(self) -> str:
        shape = f"h{self.nheads}p{self.headdim}n{self.d_state}g{self.ngroups}_{self.state.value}"
        kind = "materialize" if self.materialize else f"t{self.tokens}"
        extras = [*(["early"] if self.early else []), *([f"pf{self.prefetch}"] if self.prefetch else [])]
        pdl = [] if self.pdl is Pdl.OFF else ["pdl"]
        part = [] if self.part is Part.FUSED else [self.part.value]
        return "_".join(
            [
                "replay",
                *part,
                shape,
                f"{self.history.value}{self.window}",
                kind,
                f"w{self.warps}" + (f"h{self.helpers}" if self.helpers else "") + (f"by{self.group_heads}" if self.by_group else ""),
                *extras,
                *pdl,
            ]
        )

    @property
    def ahead(self) -> tuple[ReplaySpec, ...]:
        if self.part is not Part.MAIN:
            return ()
        heads = max(n for n in (1, 2, 4) if self.nheads // self.ngroups % n == 0)
        return (
            replace(
                self,
                part=Part.PRECOMPUTE,
                warps=2,
                helpers=0,
                group_heads=heads,
                min_blocks=0,
                prefetch=0,
                pdl=self.ahead_pdl,
                ahead_pdl=Pdl.OFF,
            ),
        )

    def early_operands(self) -> list[str]:
        return [name for name in self.operands() if self.early and name not in LATE]

    @property
    def early(self) -> bool:
        """Whether inputs that the previous kernel does not write are read before the wait for it."""
        return self.pdl is not Pdl.OFF and (self.after_conv or self.part is Part.MAIN)

    def violations(self, arch: Arch) -> list[str]:
        if not 1 <= self.warps <= 16:
            return [*self.faults(), f"warps is {self.warps}; expected 1 … 16"]
        whole = self.headdim % self.tile == 0
        return [
            *self.faults(),
            *self._by_group_violations(),
            *self._inputs_violations(),
            *must(
                not self.caches or not (self.by_group or self.prefetch_inputs),
                "history is cache with by_group or prefetch_inputs; expected neither of them",
            ),
            *must(
                self.part is Part.PRECOMPUTE or self.tile < self.headdim + 16,
                f"warps is {self.warps}, of 16 rows each; expected at most the {self.headdim} rows of a head",
            ),
            *must((self.part is Part.FUSED) != self.two_kernels, f"part is {self.part.value}; expected fused unless two_kernels"),
            *must(
                self.group_heads == 1
                or ((self.by_group or self.part is Part.PRECOMPUTE) and self.nheads // self.ngroups % self.group_heads == 0),
                f"group_heads is {self.group_heads}; expected a divisor of the heads of a group, with precompute or by_group, else 1",
            ),
            *must(
                self.part is not Part.MAIN or self.d_state * self.state.size <= 512,
                f"a row of the state has {self.d_state * self.state.size} bytes; "
                "expected at most 512 with two kernels, of which the second holds it twice",
            ),
            *must(0 <= self.helpers <= 8, f"helpers is {self.helpers}; expected 0 … 8"),
            *must(not self.helpers or self.part is not Part.PRECOMPUTE, f"helpers is {self.helpers}; expected 0 with part=precompute"),
            *must(self.shared_bytes <= 48 * 1024, f"a block uses {self.shared_bytes} bytes of shared memory; expected at most 49152"),
            *must(arch >= FP8 or self.state is not Narrow.E4M3, f"arch is {arch}; expected sm_89 or later for fp8 states"),
            *must(arch >= Arch(80), f"arch is {arch}; expected sm_80 or later for bf16 arithmetic"),
            *must(self.part is Part.MAIN or self.ahead_pdl is Pdl.OFF, f"ahead_pdl is {self.ahead_pdl.value}; expected off, or part=main"),
            *must(arch >= SM90 or self.pdl is self.ahead_pdl is Pdl.OFF, f"arch is {arch}; expected sm_90 or later, or pdl=off"),
            *must(arch >= SM90 or not self.prefetch, f"arch is {arch}; expected sm_90 or later, or prefetch=0"),
            *must(
                not self.prefetch or (self.state_loads is Loads.VECTOR and whole and self.part is not Part.PRECOMPUTE),
                f"prefetch is {self.prefetch} and the state is not loaded as whole, aligned tiles; expected 0",
            ),
        ]

    def _inputs_violations(self) -> list[str]:
        """Reasons why a block cannot prefetch the inputs of another one, if the spec wants that."""
        if not self.prefetch_inputs:
            return []
        return [
            *must(self.prefetch > 0, "prefetch_inputs is yes and prefetch is 0; expected both"),
            *must(not self.by_group, "prefetch_inputs is yes with by_group=yes; expected one of them"),
            *must(self.part is Part.FUSED and not self.materialize, "prefetch_inputs is yes; expected part=fused and materialize=no"),
            *must(
                self.index is not Index.NONE and self.cu_seqlens is Index.NONE,
                "prefetch_inputs is yes; expected slot indices and no cu_seqlens with it",
            ),
            *must(self.x.size == 2 and self.operand_loads is Loads.VECTOR, "prefetch_inputs is yes; expected 16-bit vectors of x"),
        ]

    def _by_group_violations(self) -> list[str]:
        """Broken constraints of a block that loops over heads, if the spec has one."""
        if not self.by_group:
            return []
        half = (DType.BF16, DType.F16)
        return [
            *must(self.part is Part.FUSED and not self.materialize, "by_group is yes; expected part=fused and materialize=no with it"),
            *must(self.tile == self.headdim, f"by_group is yes with warps for {self.tile} rows; expected headdim {self.headdim}"),
            *must(not self.scaled, "by_group is yes with scaled states; expected f32, f16 or bf16"),
            *must(
                self.entries <= 8 * self.warps,
                f"entries are {self.entries}; expected at most 8 for each of {self.warps} warps with by_group",
            ),
            *must(not self.helpers, f"helpers is {self.helpers} with by_group=yes; expected 0"),
            *must(max(self.tokens, self.window) <= 16, f"tokens is {self.tokens}, window {self.window}; expected at most 16 with by_group"),
            *must(self.x is DType.BF16, f"by_group is yes with x={self.x.value}; expected bf16, which a warp transposes by itself"),
            *must(self.out in half and self.z in (None, *half), "by_group is yes with a 32-bit z or out; expected 16 bits"),
            *must(self.operand_loads is self.state_loads is Loads.VECTOR, "by_group is yes with loads by elements; expected vectors"),
        ]

    # --- data staged in shared memory

    @property
    def pitch(self) -> int:
        """Vectors from one row of B or C to the next: four lanes times eight rows then use all 32 banks."""
        vectors, period = self.d_state // self.vec, 32 // (self.vec // 2)
        return vectors + (4 - vectors) % period

    @property
    def old_pitch(self) -> int:
        """The same for the history's B, where lanes read every second row."""
        return self.d_state // self.vec + 1

    @property
    def x_pitch(self) -> int:
        return self.tile + 4

    @property
    def mix_pitch(self) -> int:
        return self.entries + (8 if self.entries % 16 == 0 else 0)

    @property
    def x_terms(self) -> int:
        """bf16 terms of an element of x, B and C."""
        return min(self.terms, {DType.BF16: 1, DType.F16: 2, DType.F32: 3}[self.x])

    @property
    def state_terms(self) -> int:
        """The same for an element of the state; 8 bits are exactly one term."""
        return min(self.terms, {DType.F16: 2, Narrow.I16: 2, DType.F32: 3}.get(self.state, 1))

    @property
    def write_terms(self) -> int:
        """The same for the addition to the state: 2^-17 is far below the rounding of f16, but half of the largest rounding of int16."""
        return min(self.terms, 3 if self.state in (DType.F32, Narrow.I16) else 2)

    @property
    def shared_bytes(self) -> int:
        if self.by_group:  # fragments of C and the history's B, products of C and B, sizes of entries and tokens, and `mix` as terms
            fragments = 32 * 2 * self.vec * (self.d_state // (4 * self.vec)) * ((self.tokens + self.window) // 8)
            pairs, term = self.entries // 8 * (self.tokens // 8) * 32, (4, 8, 16)[self.terms - 1]
            return fragments + 8 * pairs + self.group_heads * (4 * (3 * self.entries + self.tokens + 4) + term * pairs)
        rows = self.window * self.old_pitch + (0 if self.materialize else 2 * self.tokens * self.pitch)
        total = self.x_terms * rows * 2 * self.vec
        if self.part is Part.MAIN:
            total -= self.x_terms * self.tokens * self.pitch * 2 * self.vec
        if self.part is not Part.PRECOMPUTE:
            total += 4 * self.x_pitch * self.entries
            total += 0 if self.materialize else 4 * self.tokens * self.mix_pitch
        return total

    # --- for the template

    def constants(self) -> dict[str, Any]:
        products = [(a, b) for a, b in product(range(3), range(3)) if a + b < self.terms]
        return {
            "pooled": self.index is not Index.NONE,
            "ragged": self.cu_seqlens is not Index.NONE,
            "step": self.history is History.STEP,
            "cached": self.caches,
            "tail": self.headdim % self.tile != 0,
            "vector_state": self.state_loads is Loads.VECTOR,
            "vector": self.operand_loads is Loads.VECTOR,
            "makes": self.part is not Part.MAIN and not self.materialize,
            "applies": self.part is not Part.PRECOMPUTE,
            "several": self.part is Part.PRECOMPUTE,
            "there": not self.materialize,  # the tokens
            "x_fits": " && tile * kTile + column < kHeadDim" if self.headdim % self.tile else "",
            "rounded": {self.state.value} if self.philox_rounds else set(),
            "narrow_noise": self.scaled and bool(self.philox_rounds),
            # Pairs of terms of the two factors of a product; the omitted pairs are below 2^-24 of it.
            "state_C": [(a, b) for a, b in products if a < self.state_terms and b < self.x_terms],
            "C_B": [(a, b) for a, b in products if a < self.x_terms and b < self.x_terms],
            "x_B": self._paired(self.window // 8, [(a, b) for a, b in products if a < self.write_terms and b < self.x_terms]),
            "x_mix": self._paired(self.entries // 8, [(a, b) for a, b in products if a < self.x_terms]),
        }

    @staticmethod
    def _paired(slices: int, products: list[tuple[int, int]]) -> list[tuple[Any, Any]]:
        """(slice of 8 entries, terms) in pairs: an instruction sums over 16."""
        units: list[Any] = [(s, a, b) for a, b in products for s in range(slices)]
        units += [None] * (len(units) % 2)
        return list(zip(units[::2], units[1::2], strict=True))


def space(problem: ReplayProblem, arch: Arch) -> Iterator[ReplaySpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    part = Part.MAIN if problem.two_kernels else Part.FUSED
    plain = {"warps": (1, 2, 4, 5), "helpers": (0, 1, 2, 4), "min_blocks": (0, 4, 5), "prefetch": (0, 264, 396), "pdl": Pdl}
    yield from trials(ReplaySpec, problem, arch, plain, part=part)
    ahead = {"warps": (2, 4), "min_blocks": (0, 4), "prefetch": (264,), "pdl": Pdl}
    yield from trials(ReplaySpec, problem, arch, ahead, part=part, prefetch_inputs=True)
    grouped = {"group_heads": (1, 2, 4, 8), "prefetch": (0, 264), "pdl": Pdl}
    yield from trials(ReplaySpec, problem, arch, grouped, part=part, by_group=True, warps=problem.headdim // 16)


# ---------------------------------------------------------------------------------------------------------------------------------
# Choosing a variant, by the heads of all sequences. Measured on an H200 (132 SMs); docs/performance.md lists all trials.

LATENCY, MIDDLE, BANDWIDTH = 64, 256, 768  # heads
LARGEST = 4096  # from here on inputs are prefetched too: 4 % less time, and 5 % more with 1024; no number between was measured


# (state, history, rounded stochastically): (heads of all sequences, at least; heads that a block loops over), as measured. Four such blocks
# fit on an SM, 528 in all: the heads per block are chosen to leave about 528 blocks.
BY_GROUP: dict[tuple[Any, History, bool], tuple[tuple[int, int], ...]] = {
    (DType.BF16, History.RING, False): ((2048, 4), (1024, 2), (256, 1)),
    (DType.BF16, History.RING, True): ((4096, 2),),
    (DType.F32, History.RING, False): ((4096, 4), (1024, 1)),
    (DType.BF16, History.STEP, True): ((4096, 8), (BANDWIDTH, 4)),
    (DType.F16, History.STEP, True): ((4096, 4),),
}


def _by_group(problem: ReplayProblem, heads: int, arch: Arch) -> dict[str, Any] | None:
    """Choices for blocks that loop over heads, if these were measured to be faster; otherwise None."""
    step, noisy = problem.history is History.STEP, problem.philox_rounds > 0
    steps = BY_GROUP.get((problem.state, problem.history, noisy), ())
    most = next((n for least, n in steps if heads >= least), 0)
    if not most or problem.tokens > 8 or problem.window > (8 if step else 16) or problem.d_state > 128:
        return None
    group = gcd(most, problem.nheads // problem.ngroups)
    return {"by_group": True, "group_heads": group, "warps": problem.headdim // 16, "prefetch": 264 if step and arch >= SM90 else 0}


def _how(problem: ReplayProblem, heads: int, arch: Arch) -> tuple[str, dict[str, Any]]:
    """(rule, choices) for this number of heads. Warps have 16 rows each."""
    long = problem.tokens > 8
    if max(problem.tokens, problem.window) > 16:  # a thread's share of these rows is too large in addition to its share of the state
        return "long", {"warps": 2, "helpers": 4}
    if problem.materialize:
        return "all", {"warps": 4}
    if heads <= LATENCY:  # few blocks: the serial work of a warp decides the time
        if long or problem.history is not History.STEP:
            return "latency", {"warps": 2, "helpers": 4 if long else 2}
        if problem.state is DType.F32:
            return "latency", {"warps": 1, "helpers": 1}
        asked = problem.headdim % 32 == 0 and problem.state_loads is Loads.VECTOR and arch >= SM90
        return "latency", {"warps": 2, "helpers": 2, "prefetch": 264 if asked else 0}
    if heads <= MIDDLE and problem.d_state * problem.state.size <= 512:
        return "middle", {"warps": 4, "helpers": 2 if problem.history is History.STEP or problem.state is DType.F32 else 4}
    many = {"warps": 5 if problem.headdim % 80 == 0 else 4}
    whole = problem.headdim % (16 * many["warps"]) == 0 and problem.state_loads is Loads.VECTOR
    if heads < BANDWIDTH or not whole or arch < SM90:
        return "many", many
    many["prefetch"] = 264
    plain = problem.history is History.STEP and problem.state is DType.BF16 and problem.z is None  # as measured
    if heads >= LARGEST and plain and not spec_of(ReplaySpec, problem, **many, prefetch_inputs=True).violations(arch):
        return "largest", many | {"prefetch_inputs": True}
    return "bandwidth", many


def candidates(problem: ReplayProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ReplaySpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic."""
    wait = Pdl.TRIGGER_LOADED if pdl else Pdl.OFF
    edge: dict[str, Any] = {"part": Part.FUSED, "pdl": wait}
    if problem.two_kernels:
        inner = Pdl.TRIGGER_LOADED if problem.internal_pdl and arch >= SM90 else Pdl.OFF
        edge = {"part": Part.MAIN, "pdl": inner, "ahead_pdl": wait}
    heads = batch * problem.nheads
    if how := _by_group(problem, heads, arch):
        yield "by group", spec_of(ReplaySpec, problem, **edge, **how), ""
    rule, how = _how(problem, heads, arch)
    if (
        pdl
        and heads > MIDDLE
        and problem.history is History.RING
        and problem.state is DType.BF16
        and not (problem.two_kernels or problem.after_conv or problem.materialize)
    ):
        edge["pdl"] = Pdl.WAIT  # 2 … 3 % less time; measured for bf16 states only
    yield rule, spec_of(ReplaySpec, problem, **edge, **how), ""
    for warps in (4, 2, 1):  # the largest number that fits a small head and shared memory
        yield f"{warps} warps", spec_of(ReplaySpec, problem, **edge, warps=warps), ""
