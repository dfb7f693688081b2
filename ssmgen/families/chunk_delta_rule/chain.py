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

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from ...engine.chunks import chain, warpgroups
from ...engine.chunks.chain import Backend, Chain, Role, by_warps
from ...engine.chunks.kernels import edge_of, of_problem
from ...engine.chunks.problem import CHUNK
from ...engine.chunks.segments import why_not
from ...engine.recurrences.attention.problem import Beta
from ...spec.kernel import NAMED, Arch, DType, KernelSpec, Loads, Needs, Pdl
from .prepare import PrepareSpec
from .problem import COEFFICIENTS, MAX_SIZE, OPERATOR, PANEL_BYTES, PANELS, SIZE, ChunkProblem, DeltaProblem, Gate
from .segments import JoinSpec
from .spec import DeltaSpec

__all__ = ["MAX_SIZE", "OPERATOR", "SIZE", "ChainSpec", "candidates", "space"]


@dataclass(frozen=True, kw_only=True)
class ChainSpec(Chain, DeltaSpec, DeltaProblem):
    """A problem, and how it is computed: by this kernel after the one that prepares. No choice here changes a bit of the result, in either
    backend."""

    family: ClassVar[str] = OPERATOR

    role: Role = field(default=Role.CHAIN, metadata=NAMED)
    backend: Backend = field(default=Backend.WARPS, metadata=NAMED)
    tile: int = 64  # rows of the state (value channels) per block, 16 per walker
    stages: int = 2  # chunks in shared memory: the current one, and the chunks that are loading
    fetchers: int = 1  # warps
    min_blocks: int = 1  # blocks per SM that ptxas must leave registers for
    ahead_pdl: Pdl = Pdl.OFF  # PDL of the kernel that prepares
    transitions: bool = field(default=True, metadata=NAMED)  # role ENDS: also compute M

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


def _spec(problem: DeltaProblem, **how: Any) -> ChainSpec:
    return ChainSpec(**of_problem(problem, DeltaProblem), **how)


def _by_warpgroups(problem: DeltaProblem, **how: Any) -> ChainSpec:
    return ChainSpec.by_warpgroups(**of_problem(problem, DeltaProblem), **how)


def warpgroup_space(problem: DeltaProblem, arch: Arch) -> Iterator[ChainSpec]:
    """Every legal variant with warpgroups, within the axes that are worth a trial."""
    return warpgroups.variants(partial(_by_warpgroups, problem), arch)


def space(problem: DeltaProblem, arch: Arch) -> Iterator[ChainSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    yield from warpgroup_space(problem, arch)
    yield from chain.space(partial(_spec, problem), (1, 2), arch)


def candidates(problem: DeltaProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ChainSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one needs the least shared memory."""
    if problem.divided:  # the parts of a sequence are scanned at once
        rules = _rules(problem, size * problem.segments, arch, pdl)
        yield from ((f"up to {problem.segments} segments, {rule}", spec, why) for rule, spec, why in rules)
    else:
        yield "segments", None, why_not(problem.head_v, size)
        yield from _rules(problem, size, arch, pdl)


def _rules(problem: DeltaProblem, size: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, ChainSpec | None, str]]:
    edge = edge_of(arch, pdl)
    yield from warpgroups.rules(partial(_by_warpgroups, problem, **edge), problem.head_v, size, wide=(2, 3))
    fetchers = {16: 1, 8: 2}.get(problem.copy, 4)  # narrower copies need more of them
    yield from by_warps(partial(_spec, problem, **edge, fetchers=fetchers), problem.head_v, size)
