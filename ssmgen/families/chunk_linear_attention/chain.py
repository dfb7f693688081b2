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

from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.chunks.chain import Chain
from ...engine.chunks.kernels import of_problem
from ...engine.chunks.variants import Variants
from ...engine.chunks.warpgroups import ROWS
from ...engine.recurrences.attention.problem import Beta, Gate
from ...spec.kernel import Arch, KernelSpec, Loads, Needs, must
from .operands import OF_OWN_TYPE
from .prepare import PrepareSpec
from .problem import MAX_SIZE, OPERATOR, PANELS, SIZE, ImageProblem, LinearPromptProblem, Rule
from .segments import FEWEST, JoinSpec
from .spec import LinearSpec
from .stages import HALF, Piece, Stage, half_words, of_warpgroups, of_warps

__all__ = ["MAX_SIZE", "OPERATOR", "SIZE", "ChainSpec", "candidates", "space", "warpgroup_space"]


@dataclass(frozen=True, kw_only=True)
class ChainSpec(Chain, LinearSpec, LinearPromptProblem):
    """A problem, and how it is computed. No choice here changes a bit of the result, in either backend."""

    family: ClassVar[str] = OPERATOR

    def prepared(self) -> tuple[KernelSpec, KernelSpec]:
        return PrepareSpec(**of_problem(self, ImageProblem), pdl=self.ahead_pdl), JoinSpec.of(self, rule=Rule.DELTA)

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


_VARIANTS = Variants(chain=ChainSpec, fetchers=(1, 2, 4), by_copy={16: 2}, fewest=FEWEST)
warpgroup_space, space, candidates = _VARIANTS.warpgroup_space, _VARIANTS.space, _VARIANTS.candidates
