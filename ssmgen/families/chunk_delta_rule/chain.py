"""The second kernel of chunk_delta_rule: a sequence's chunks one after the other, from their images, by each warp's own products.

A block walks a sequence for `tile` rows of one head's state. Some of its warps, the walkers, hold 16 of these rows each in f32, in the
registers in which products are summed, from the first chunk to the last; the others fetch what later chunks need. All products are made
transposed: rounded, the state is the first operand of those with k and q, and so are X^T and u^T of theirs. Nothing passes between
warps, and shared memory holds second operands only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ...engine.chunks.kernels import TILES, Chain, Counts, by_warps, edge_of, of_lead, of_problem
from ...engine.chunks.problem import CHUNK
from ...spec import SM90, Arch, KernelSpec, Pdl
from .prepare import PrepareSpec
from .problem import COEFFICIENTS, COEFFICIENTS_AT, MAX_SIZE, OPERATOR, SIZE, ChunkProblem, DeltaProblem
from .spec import DeltaSpec

__all__ = ["MAX_SIZE", "OPERATOR", "SIZE", "ChainSpec", "candidates", "space"]


@dataclass(frozen=True, kw_only=True)
class ChainSpec(Chain, DeltaSpec, DeltaProblem):
    """A problem, and how it is computed: by this kernel behind the one that prepares. No choice here changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "chunk_delta_rule/chain.cu.j2"
    here: ClassVar[tuple[str, ...]] = (
        "images", "q", "k", "v", "cu_seqlens", "initial_states", "final_states", "state", "state_indices", "has_initial_state",
        "checkpoint_positions", "checkpoints", "out",
    )  # fmt: skip
    sums: ClassVar[bool] = False  # whether it makes N and M of segments, and no outputs

    tile: int = 64  # rows of the state (value channels) per block, 16 per walker
    stages: int = 2  # chunks in shared memory: that which is computed, and those on their way
    fetchers: int = 1  # warps
    min_blocks: int = 1  # blocks per SM that ptxas must leave registers for
    ahead_pdl: Pdl = Pdl.OFF  # of the kernel that prepares

    @property
    def ahead(self) -> tuple[KernelSpec, ...]:
        from .segments import JoinSpec

        prepare = PrepareSpec(**of_problem(self, ChunkProblem), pdl=self.ahead_pdl)
        return (prepare, self.leading(), self.summing(), JoinSpec.of(self)) if self.divided else (prepare,)

    def leading(self) -> ChainSpec:
        """The kernel that walks first segments, and sequences that are not cut."""
        from .segments import LeadSpec

        return LeadSpec(**of_lead(self, DeltaProblem))

    def summing(self) -> ChainSpec:
        """The kernel that makes N and M of segments."""
        from .segments import SumsSpec, of_sums

        tile = max(t for t in TILES if t <= self.tile and self.head_k % t == 0)
        return SumsSpec(**of_sums(self), tile=tile, stages=self.stages, fetchers=self.fetchers, min_blocks=self.min_blocks)

    def ending(self, transitions: bool) -> ChainSpec:
        """The kernel that makes N of whole sequences, with `transitions` M too, from the images of this one."""
        from ...engine.chunks.segments import of_ends
        from .segments import EndsSpec, of_sums

        tile = max(t for t in TILES if t <= self.tile and self.head_k % t == 0)
        how: dict[str, Any] = {"tile": tile, "stages": self.stages, "fetchers": self.fetchers, "min_blocks": self.min_blocks}
        return EndsSpec(**of_ends(of_sums(self), transitions), **how)

    def blocks(self, counts: Counts) -> int:
        walked = self.candidates(counts.tokens, counts.sequences) * self.segments if self.behind else counts.sequences
        return walked * counts.heads * self.tiles

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
    def dynamic_bytes(self) -> int:
        """k, q, v and the image of each stage's chunk."""
        return self.stages * (4 * CHUNK * (2 * self.row_words + self.v_words) + COEFFICIENTS_AT + 4 * COEFFICIENTS)


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
    from ...engine.chunks.segments import why_not

    if problem.divided:  # as many parts of a sequence are walked at once
        rules = _rules(problem, size * problem.segments, arch, pdl)
        yield from ((f"up to {problem.segments} segments, {rule}", spec, why) for rule, spec, why in rules)
    else:
        yield "segments", None, why_not(problem.head_v, size)
        yield from _rules(problem, size, arch, pdl)


def _rules(problem: DeltaProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ChainSpec | None, str]]:
    from .warpgroups import by_warpgroups

    edge = edge_of(arch, pdl)
    yield from by_warpgroups(problem, size, edge)
    fetchers = {16: 1, 8: 2}.get(problem.copy, 4)  # the narrower copies are, the more there are
    yield from by_warps(partial(_spec, problem, **edge, fetchers=fetchers), problem.head_v, size)
