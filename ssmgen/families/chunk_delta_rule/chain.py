"""The second kernel of chunk_delta_rule: a sequence's chunks one after the other, from their images in the workspace.

A block scans a sequence for `tile` rows of one head's state. With products of single warps, some warps, the walkers, each hold 16 rows
in f32, in the accumulators, from the first chunk to the last; the other warps load the data of later chunks.
All products are transposed: the rounded state is the first operand of products with k and q, and X^T and u^T of their products. Nothing
passes between warps, and shared memory holds second operands only.

With warpgroups, the tensor cores of sm_90a read operands directly from shared memory. A block has a warpgroup that loads, one that writes
o, and one for every 64 rows of the state. All products are transposed: the rounded state, X and u are first operands,
and nothing passes between the warps that compute them. The next state does not depend on S q^T and P u: they are issued while a warpgroup
would otherwise wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.chunks.chain import Chain
from ...engine.chunks.kernels import of_problem
from ...engine.chunks.problem import CHUNK
from ...engine.chunks.variants import Variants
from ...engine.recurrences.attention.problem import Beta
from ...spec.kernel import DType, KernelSpec, Loads, Needs
from .prepare import PrepareSpec
from .problem import COEFFICIENTS, MAX_SIZE, OPERATOR, PANEL_BYTES, PANELS, SIZE, ChunkProblem, DeltaProblem, Gate
from .spec import DeltaSpec, JoinSpec

__all__ = ["MAX_SIZE", "OPERATOR", "SIZE", "ChainSpec", "candidates", "space", "warpgroup_space"]


@dataclass(frozen=True, kw_only=True)
class ChainSpec(Chain, DeltaSpec, DeltaProblem):
    """A problem, and how it is computed. No choice here changes a bit of the result, in either backend."""

    family: ClassVar[str] = OPERATOR

    fetchers: int = 1  # warps

    def prepared(self) -> tuple[KernelSpec, KernelSpec]:
        return PrepareSpec(**of_problem(self, ChunkProblem), pdl=self.ahead_pdl), JoinSpec.of(self)

    def unread(self) -> dict[str, Any]:
        gates = {"g": None, "gate": Gate.NONE, "A_log": None, "dt_bias": None, "l2norm": False}
        return gates | {"beta": DType.BF16, "beta_form": Beta.PLAIN}

    def shape(self) -> list[str]:
        return [f"k{self.head_k}v{self.head_v}", self.state.value, self.x.value, self.layout.value]

    @property
    def needs(self) -> Needs:
        if not self.grouped:
            return super().needs
        return Needs(  # chunks of all segments except the last are whole
            matrices=True, copies=self.ragged and not self.sums, barriers=True, maps=True, elements=self.state_loads is Loads.ELEMENT,
            bytes=True, shared_pairs=True, warpgroups=tuple(sorted({CHUNK, self.head_k})), panels=True, mma=self.x.value,
        )  # fmt: skip

    @property
    def mapped(self) -> dict[str, int]:
        if not self.grouped:
            return {}
        return {"k": self.head_k, "v": self.tile} if self.sums else {"k": self.head_k, "q": self.head_k, "v": self.tile}

    @property
    def row_words(self) -> int:
        """32-bit words from one token's q or k to the next one's: rows are 16 bytes apart modulo 32, so that eight rows use all banks."""
        return self.head_k // 2 + 4

    @property
    def stage_bytes(self) -> int:
        """k, q, v, T, P and coefficients of a chunk; sums take no q and no P. With warpgroups, each begins at a multiple of 1024, and
        panels have room for all rows."""
        matrices = 1 if self.sums else 2
        if self.grouped:
            rows = CHUNK * 2 * (matrices * self.head_k + self.tile)
            return rows + matrices * PANELS * PANEL_BYTES[0] + -(-4 * COEFFICIENTS // 1024) * 1024
        return 4 * CHUNK * (matrices * self.row_words + self.v_words) + matrices * sum(PANEL_BYTES) + 4 * COEFFICIENTS

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of the stages, and of o with warpgroups."""
        return self.stages * self.stage_bytes + (CHUNK * 2 * self.tile if self.grouped and not self.sums else 0)

    def constants(self) -> dict[str, Any]:
        return super().constants() | ({"stage_words": self.stage_bytes // 4} if self.grouped else {})


_VARIANTS = Variants(chain=ChainSpec, fetchers=(1, 2), by_copy={16: 1, 8: 2}, wide=(2, 3))
warpgroup_space, space, candidates = _VARIANTS.warpgroup_space, _VARIANTS.space, _VARIANTS.candidates
