"""The second kernel of chunk_linear_attention: a sequence's chunks one after the other, from their images in the workspace.

A block scans a sequence for `tile` rows of one head's state. With products of single warps, some warps, the walkers, each hold 16 rows
in f32, in the accumulators, from the first chunk to the last; the other warps load the data of later chunks.
All products are transposed: the rounded state is the first operand of products with E and Q, and X^T and u^T of their products. Nothing
passes between warps, and shared memory holds second operands only, in the layout of the images.

In the low-rank form, rows of the first half of a chunk read nothing and produce no output: their u is v.

With warpgroups, the tensor cores of sm_90a read operands directly from shared memory. A block has one warpgroup that loads, one that writes
o, and one for every 64 rows of the state. All products are transposed: the rounded state, X and u are first operands, and nothing passes
between the warps that compute them. If the update reads the state, the next state does not depend on S Q^T and P u, so they are issued
while a warpgroup would otherwise wait. Without such a read, chunks depend on each other only by the state, which is summed while o is
stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from ...engine.chunks import chain, warpgroups
from ...engine.chunks.chain import Backend, Chain, Role, by_warps
from ...engine.chunks.kernels import edge_of, of_problem
from ...engine.chunks.segments import why_not
from ...engine.chunks.warpgroups import ROWS
from ...engine.recurrences.attention.problem import Beta, Gate
from ...spec.kernel import NAMED, Arch, KernelSpec, Loads, Needs, Pdl, must
from .operands import OF_OWN_TYPE
from .prepare import PrepareSpec
from .problem import MAX_SIZE, OPERATOR, PANELS, SIZE, ImageProblem, LinearPromptProblem, Rule
from .segments import FEWEST, JoinSpec
from .spec import LinearSpec
from .stages import HALF, Piece, Stage, half_words, of_warpgroups, of_warps

__all__ = ["MAX_SIZE", "OPERATOR", "SIZE", "ChainSpec", "candidates", "space"]


@dataclass(frozen=True, kw_only=True)
class ChainSpec(Chain, LinearSpec, LinearPromptProblem):
    """A problem, and how it is computed: by this kernel after the one that prepares. No choice here changes a bit of the result, in either
    backend."""

    family: ClassVar[str] = OPERATOR

    role: Role = field(default=Role.CHAIN, metadata=NAMED)
    backend: Backend = field(default=Backend.WARPS, metadata=NAMED)
    tile: int = 64  # rows of the state (value channels) per block, 16 per walker
    stages: int = 2  # chunks in shared memory: the current one, and the chunks that are loading
    fetchers: int = 2  # warps
    min_blocks: int = 1  # blocks per SM that ptxas must leave registers for
    ahead_pdl: Pdl = Pdl.OFF  # PDL of the kernel that prepares
    transitions: bool = field(default=True, metadata=NAMED)  # role ENDS: also compute M

    def prepared(self) -> tuple[KernelSpec, KernelSpec]:
        return PrepareSpec(**of_problem(self, ImageProblem), pdl=self.ahead_pdl), JoinSpec.of(self)

    def unread(self) -> dict[str, Any]:
        none: dict[str, Any] = dict.fromkeys(OF_OWN_TYPE)
        return none | {"gate": Gate.LOG, "beta_form": Beta.PLAIN, "rule": Rule.DELTA, "read": False, "l2norm": False}

    def shape(self) -> list[str]:
        return [self.rule.value, f"k{self.head_k}v{self.head_v}", self.state.value, self.x.value, self.layout.value]

    @property
    def needs(self) -> Needs:
        if not self.grouped:
            return super().needs
        columns = tuple(sorted({self.rule.tokens, self.head_k} | ({HALF} if self.rule.reads else set())))
        return Needs(  # chunks of all segments except the last are whole
            matrices=True, copies=self.ragged and not self.sums, barriers=True, maps=True, elements=self.state_loads is Loads.ELEMENT,
            bytes=True, shared_pairs=True, places=True, placed_stores=True, warpgroups=columns, panels=True, mma=self.x.value,
        )  # fmt: skip

    @property
    def mapped(self) -> dict[str, int]:
        return {"v": self.tile} if self.grouped else {}

    @property
    def _laid(self) -> tuple[Stage, list[Piece]]:
        v_words = self.rule.tokens * self.v_words
        return of_warpgroups(self.image, self.rule, v_words, self.sums) if self.grouped else of_warps(self.image, v_words, self.sums)

    @property
    def stage(self) -> Stage:
        return self._laid[0]

    @property
    def pieces(self) -> list[Piece]:
        """All parts of a chunk's workspace except decays, merged where they are contiguous in global and in shared memory."""
        return self._laid[1]

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of v and of the workspace of each stage's chunk, and of o with warpgroups."""
        out = self.rule.tokens * 2 * self.tile if self.grouped and not self.sums else 0
        return self.stages * 4 * (self.stage.words + self.head_k) + out

    def violations_of_shape(self, arch: Arch) -> list[str]:
        found = super().violations_of_shape(arch)
        if not self.grouped:
            return found
        return found + must(
            self.tile != 2 * ROWS or self.head_k == 64 or not self.rule.weighs or self.sums,
            f"tile is {self.tile} with K = {self.head_k} and rule={self.rule.value}; expected {ROWS}, for enough registers",
        )

    def constants(self) -> dict[str, Any]:
        found = super().constants() | {
            "at": self.stage,
            "pieces": self.pieces,
            "places": min(4, self.head_k // 16),  # places where a lane reads 16 of the 64 columns of a block
        }
        if not self.grouped:
            return found
        if self.rule.weighs and self.marked and self.tile == ROWS:
            found["registers"] = WEIGHING
        words = half_words(self.rule)
        found |= {"tile_rows": self.rule.tokens, "half": HALF, "half_panels": [sum(words[:c]) for c in range(PANELS)]}
        return found | ({"filled_by": 2} if self.sums else {})


# Registers of a thread that loads, that writes o, and that holds the state, if u has a second term and states at positions are wanted: with
# 240 for the last kind some variants spill.
WEIGHING = (56, 88, 248)


def _spec(problem: LinearPromptProblem, **how: Any) -> ChainSpec:
    return ChainSpec(**of_problem(problem, LinearPromptProblem), **how)


def _by_warpgroups(problem: LinearPromptProblem, **how: Any) -> ChainSpec:
    return ChainSpec.by_warpgroups(**of_problem(problem, LinearPromptProblem), **how)


def warpgroup_space(problem: LinearPromptProblem, arch: Arch) -> Iterator[ChainSpec]:
    """Every legal variant with warpgroups, within the axes that are worth a trial."""
    return warpgroups.variants(partial(_by_warpgroups, problem), arch)


def space(problem: LinearPromptProblem, arch: Arch) -> Iterator[ChainSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    yield from warpgroup_space(problem, arch)
    yield from chain.space(partial(_spec, problem), (1, 2, 4), arch)


def candidates(problem: LinearPromptProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ChainSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one needs the least shared memory."""
    if problem.divided:  # the parts of a sequence are scanned at once
        rules = _rules(problem, size * problem.segments, arch, pdl)
        yield from ((f"up to {problem.segments} segments, {rule}", spec, why) for rule, spec, why in rules)
    else:
        if problem.rule.weighs:
            yield "segments", None, why_not(problem.head_v, size, FEWEST)
        yield from _rules(problem, size, arch, pdl)


def _rules(problem: LinearPromptProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ChainSpec | None, str]]:
    edge = edge_of(arch, pdl)
    yield from warpgroups.rules(partial(_by_warpgroups, problem, **edge), problem.head_v, size)
    make = partial(_spec, problem, **edge, fetchers=4 if problem.copy < 16 else 2)
    yield from by_warps(make, problem.head_v, size)
