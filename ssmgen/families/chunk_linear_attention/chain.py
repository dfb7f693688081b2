"""The second kernel of chunk_linear_attention: a sequence's chunks one after the other, from their images, by each warp's own products.

A block walks a sequence for `tile` rows of one head's state. Some of its warps, the walkers, hold 16 of these rows each in f32, in the
registers in which products are summed, from the first chunk to the last; the others fetch what later chunks need. All products are made
transposed: rounded, the state is the first operand of those with E and Q, and so are X^T and u^T of theirs. Nothing passes between
warps, and shared memory holds second operands only, as they lie in images.

Of the low-rank form, rows of the first half of a chunk read nothing and make no output: u of them is v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from ...engine.chunks.kernels import TILES, Chain, Counts, by_warps, edge_of, of_lead, of_problem
from ...spec import SM90, Arch, KernelSpec, Pdl
from .prepare import PrepareSpec
from .problem import MAX_SIZE, OPERATOR, SIZE, ImageProblem, LinearPromptProblem
from .spec import LinearSpec

__all__ = ["MAX_SIZE", "OPERATOR", "SIZE", "ChainSpec", "candidates", "space"]


class Stage(NamedTuple):
    """Where the parts of a chunk begin in shared memory, in words, behind E; and how many it takes. Decays lie behind all chunks."""

    q: int
    w: int
    t: int
    rest: int
    p: int
    v: int
    words: int


@dataclass(frozen=True, kw_only=True)
class ChainSpec(Chain, LinearSpec, LinearPromptProblem):
    """A problem, and how it is computed: by this kernel behind the one that prepares. No choice here changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "chunk_linear_attention/chain.cu.j2"
    here: ClassVar[tuple[str, ...]] = (
        "images", "v", "cu_seqlens", "initial_states", "final_states", "state", "state_indices", "has_initial_state",
        "checkpoint_positions", "checkpoints", "out",
    )  # fmt: skip

    tile: int = 64  # rows of the state (value channels) per block, 16 per walker
    stages: int = 2  # chunks in shared memory: that which is computed, and those on their way
    fetchers: int = 2  # warps
    min_blocks: int = 1  # blocks per SM that ptxas must leave registers for
    ahead_pdl: Pdl = Pdl.OFF  # of the kernel that prepares

    @property
    def ahead(self) -> tuple[KernelSpec, ...]:
        from .segments import JoinSpec

        prepare = PrepareSpec(**of_problem(self, ImageProblem), pdl=self.ahead_pdl)
        return (prepare, self.leading(), self.summing(), JoinSpec.of(self)) if self.divided else (prepare,)

    def leading(self) -> ChainSpec:
        """The kernel that walks first segments, and sequences that are not cut."""
        from .segments import LeadSpec

        return LeadSpec(**of_lead(self, LinearPromptProblem))

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
        shape = f"{self.rule.value}_k{self.head_k}v{self.head_v}_{self.state.value}_{self.x.value}_{self.layout.value}"
        segments = f"n{self.segments}" if self.divided else ""
        return f"linear_chain_{shape}_t{self.tile}s{self.stages}f{self.fetchers}{blocks}{segments}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    @property
    def stage(self) -> Stage:
        image = self.image
        v = image.decay // 4
        return Stage(image.q // 4, image.w // 4, image.t // 4, image.rest // 4, image.p // 4, v, v + self.rule.tokens * self.v_words)

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """(first byte in an image, bytes, first word in shared memory) of everything but decays, as it lies together in both."""
        return [(0, self.image.decay, 0)]

    @property
    def dynamic_bytes(self) -> int:
        """v and the image of each stage's chunk."""
        return self.stages * 4 * (self.stage.words + self.head_k)

    def constants(self) -> dict[str, Any]:
        return super().constants() | {
            "at": self.stage,
            "pieces": self.pieces,
            "places": min(4, self.head_k // 16),  # from which a lane reads 16 of the 64 columns of a block
        }


def _spec(problem: LinearPromptProblem, **how: Any) -> ChainSpec:
    return ChainSpec(**of_problem(problem, LinearPromptProblem), **how)


def space(problem: LinearPromptProblem, arch: Arch) -> Iterator[ChainSpec]:
    """Every legal variant of a problem within the axes worth trying."""
    from .warpgroups import warpgroup_space

    yield from warpgroup_space(problem, arch)
    inner = Pdl.TRIGGER_LOADED if arch >= SM90 else Pdl.OFF
    for tile in TILES:
        for stages in (1, 2, 3):
            for fetchers in (1, 2, 4):
                for ahead in Pdl:
                    spec = _spec(problem, tile=tile, stages=stages, fetchers=fetchers, pdl=inner, ahead_pdl=ahead)
                    if not spec.violations(arch):
                        yield spec


def candidates(problem: LinearPromptProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ChainSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one needs the least shared memory."""
    from ...engine.chunks.segments import why_not
    from .segments import FEWEST

    if problem.divided:  # as many parts of a sequence are walked at once
        rules = _rules(problem, size * problem.segments, arch, pdl)
        yield from ((f"up to {problem.segments} segments, {rule}", spec, why) for rule, spec, why in rules)
    else:
        if problem.rule.weighs:
            yield "segments", None, why_not(problem.head_v, size, FEWEST)
        yield from _rules(problem, size, arch, pdl)


def _rules(problem: LinearPromptProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ChainSpec | None, str]]:
    from .warpgroups import by_warpgroups

    edge = edge_of(arch, pdl)
    yield from by_warpgroups(problem, size, edge)
    make = partial(_spec, problem, **edge, fetchers=4 if problem.copy < 16 else 2)
    yield from by_warps(make, problem.head_v, size)
