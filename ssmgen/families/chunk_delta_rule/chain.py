"""The second kernel of chunk_delta_rule: a sequence's chunks one after the other, from their images, by each warp's own products.

A block walks a sequence for `tile` rows of one head's state. Some of its warps, the walkers, hold 16 of these rows each in f32, in the
registers in which products are summed, from the first chunk to the last; the others fetch what later chunks need. All products are made
transposed: rounded, the state is the first operand of those with k and q, and so are X^T and u^T of theirs. Nothing passes between
warps, and shared memory holds second operands only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ...spec import SM90, Arch, Index, KernelSpec, Loads, Needs, Pdl, must
from .prepare import PrepareSpec
from .problem import CHUNK, COEFFICIENTS, COEFFICIENTS_AT, MAX_SIZE, OPERATOR, SIZE, ChunkProblem, DeltaProblem
from .spec import Counts, DeltaSpec, of_problem

__all__ = ["MAX_SIZE", "OPERATOR", "SIZE", "ChainSpec", "candidates", "space"]

# Powers of two, by which rows of v are turned in shared memory. With 128, ptxas leaves a thread 168 registers of the 217 that it wants.
TILES = (16, 32, 64)
# Blocks of 32 rows of one sequence: up to so many have an SM each, whose shared memory then serves two warps. Four would wait for it.
FEW = 128


@dataclass(frozen=True, kw_only=True)
class ChainSpec(DeltaSpec, DeltaProblem):
    """A problem, and how it is computed: by this kernel behind the one that prepares. No choice here changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "chunk_delta_rule/chain.cu.j2"
    here: ClassVar[tuple[str, ...]] = (
        "images", "q", "k", "v", "cu_seqlens", "initial_states", "final_states", "state", "state_indices", "has_initial_state",
        "checkpoint_positions", "checkpoints", "out",
    )  # fmt: skip
    written: ClassVar[tuple[str, ...]] = ("out", "final_states", "state", "checkpoints")

    terms: ClassVar[int] = 1  # 16-bit terms of an operand of a product
    sums: ClassVar[bool] = False  # whether it makes N and M of segments, and no outputs

    tile: int = 64  # rows of the state (value channels) per block, 16 per walker
    stages: int = 2  # chunks in shared memory: that which is computed, and those on their way
    fetchers: int = 1  # warps
    min_blocks: int = 1  # blocks per SM that ptxas must leave registers for
    ahead_pdl: Pdl = Pdl.OFF  # of the kernel that prepares

    @property
    def needs(self) -> Needs:
        elements = self.state_loads is Loads.ELEMENT
        return Needs(
            matrices=True, matrix_turns=True, matrix_stores=True, shared_pairs=True, shared_quads=True, places=True, copies=True,
            meetings=True, bytes=True, elements=elements, mma=self.x.value,
        )  # fmt: skip

    @property
    def early(self) -> bool:
        """Whether what the kernel ahead does not write is read before the wait for it."""
        return self.pdl not in (Pdl.OFF, Pdl.TRIGGER_TOP)

    def early_operands(self) -> list[str]:
        late = ("workspace", "out", "final_states", "checkpoints")
        return [name for name in self.operands() if self.early and name not in late]

    @property
    def ahead(self) -> tuple[KernelSpec, ...]:
        from .segments import JoinSpec

        prepare = PrepareSpec(**of_problem(self, ChunkProblem), pdl=self.ahead_pdl)
        return (prepare, self.summing(), JoinSpec.of(self)) if self.divided else (prepare,)

    def summing(self) -> ChainSpec:
        """The kernel that makes N and M of segments."""
        from .segments import SumsSpec, of_sums

        tile = max(t for t in TILES if t <= self.tile and self.head_k % t == 0)
        return SumsSpec(**of_sums(self), tile=tile, stages=self.stages, fetchers=self.fetchers, min_blocks=self.min_blocks)

    @property
    def threads_per_block(self) -> int:
        return 32 * (self.tile // 16 + self.fetchers)

    @property
    def tiles(self) -> int:
        """Blocks per head."""
        return self.head_v // self.tile

    def blocks(self, counts: Counts) -> int:
        further = self.candidates(counts.tokens, counts.sequences) * (self.segments - 1)  # than each sequence's first segment
        return (counts.sequences + further) * counts.heads * self.tiles

    @property
    def stem(self) -> str:
        blocks = f"b{self.min_blocks}" if self.min_blocks > 1 else ""
        shape = f"k{self.head_k}v{self.head_v}_{self.state.value}_{self.x.value}_{self.layout.value}"
        segments = f"n{self.segments}" if self.divided else ""
        return f"delta_chain_{shape}_t{self.tile}s{self.stages}f{self.fetchers}{blocks}{segments}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    @property
    def row_words(self) -> int:
        """32-bit words from one token's q or k to the next one's: rows are 16 bytes apart modulo 32, so that eight meet all banks."""
        return self.head_k // 2 + 4

    @property
    def v_words(self) -> int:
        """The same of v, whose rows are turned."""
        return self.tile // 2

    @property
    def dynamic_bytes(self) -> int:
        """k, q, v and the image of each stage's chunk."""
        return self.stages * (4 * CHUNK * (2 * self.row_words + self.v_words) + COEFFICIENTS_AT + 4 * COEFFICIENTS)

    @property
    def shared_bytes(self) -> int:
        return self.dynamic_bytes

    def constants(self) -> dict[str, Any]:
        return super().constants() | {
            "vector_state": self.state_loads is Loads.VECTOR,
            "pooled": self.index is not Index.NONE,
            "past": "state" if self.started else "initial_states" if self.initial else "",  # what holds the state before the first token
            "past_slot": "sequence" if self.pool and self.initial else "slot",
            "kept": "state" if self.pool else "final_states" if self.final else "",  # what receives the last one
        }

    def violations(self, arch: Arch) -> list[str]:
        if problems := [
            *self.faults(),
            *must(self.tile in TILES, f"tile {self.tile} is not {', '.join(map(str, TILES))}"),
        ]:
            return problems
        return [
            *must(self.head_v % self.tile == 0, f"tile {self.tile} does not divide V {self.head_v}"),
            *must(1 <= self.stages <= 4, f"stages {self.stages} are not 1 … 4"),
            *must(self.min_blocks >= 1, f"min_blocks {self.min_blocks} is not positive"),
            *must(self.fetchers in (1, 2, 4), f"fetchers {self.fetchers} are not 1, 2 or 4"),
            *must(self.min_blocks == 1 or self.tile <= 32, f"{self.min_blocks} blocks of {self.tile} rows leave too few registers"),
            *must(arch >= SM90 or self.ahead_pdl is Pdl.OFF, f"programmatic dependent launch needs sm_90, not {arch}"),
            *self.common_violations(arch, self.shared_bytes),
        ]


def _spec(problem: DeltaProblem, **how: Any) -> ChainSpec:
    return ChainSpec(**of_problem(problem, DeltaProblem), **how)


def space(problem: DeltaProblem, arch: Arch) -> Iterator[ChainSpec]:
    """Every legal variant of a problem within the axes worth trying."""
    from .warpgroups import warpgroup_space

    yield from warpgroup_space(problem, arch)
    inner = Pdl.TRIGGER_LOADED if arch >= SM90 else Pdl.OFF
    for tile in TILES:
        for stages in (1, 2, 3):
            for fetchers in (1, 2):
                for ahead in Pdl:
                    spec = _spec(problem, tile=tile, stages=stages, fetchers=fetchers, pdl=inner, ahead_pdl=ahead)
                    if not spec.violations(arch):
                        yield spec


def candidates(problem: DeltaProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ChainSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one needs the least shared memory."""
    from .segments import why_not

    if problem.divided:  # as many parts of a sequence are walked at once
        rules = _rules(problem, size * problem.segments, arch, pdl)
        yield from ((f"up to {problem.segments} segments, {rule}", spec, why) for rule, spec, why in rules)
    else:
        yield "segments", None, why_not(problem, size)
        yield from _rules(problem, size, arch, pdl)


def _rules(problem: DeltaProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ChainSpec | None, str]]:
    from .warpgroups import by_warpgroups

    edge = {"pdl": Pdl.TRIGGER_LOADED if arch >= SM90 else Pdl.OFF, "ahead_pdl": Pdl.TRIGGER_LOADED if pdl else Pdl.OFF}
    yield from by_warpgroups(problem, size, edge)
    tiles = [t for t in TILES if problem.head_v % t == 0]
    few = [t for t in tiles if t <= 32]
    tile = few[-1] if size * problem.head_v // 32 <= FEW else tiles[-1]
    how: dict[str, Any] = edge | {"fetchers": {16: 1, 8: 2}.get(problem.copy, 4)}  # the narrower copies are, the more there are
    # With three stages a chunk has the time of two to come, with two that of one; with one, nothing overlaps.
    yield "three stages", _spec(problem, tile=tile, stages=3, **how), ""
    yield "two stages", _spec(problem, tile=tile, stages=2, **how), ""
    yield "narrow", _spec(problem, tile=few[-1], stages=2, **how), ""
    yield "one stage", _spec(problem, tile=tile, stages=1, **how), ""
    yield "generic", _spec(problem, tile=16, stages=1, **how), ""
