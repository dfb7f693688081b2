"""The chain of chunk_delta_rule by warpgroups: the tensor cores of sm_90a, which read operands from shared memory by themselves.

A block has a warpgroup that fetches, one that writes o, and one for every 64 rows of the state, which it holds in f32, in the registers in
which products are summed. Everything is made transposed: the state, X and u, rounded, are there as first operands, and nothing
passes between the warps that make them. What the state does not wait for, S q^T and P u, is asked for where it would wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ...engine.chunks.kernels import of_lead, of_problem
from ...engine.chunks.problem import CHUNK
from ...engine.chunks.warpgroups import ROWS, TILES, ByWarpgroups, rules, variants
from ...spec import Arch, Loads, Needs
from .chain import ChainSpec
from .problem import COEFFICIENTS, PANEL_BYTES, PANELS, DeltaProblem


@dataclass(frozen=True, kw_only=True)
class WarpgroupChainSpec(ByWarpgroups, ChainSpec):
    """A problem, and how warpgroups compute it. No choice here changes a bit of the result; those of the other chain are others."""

    family: ClassVar[str] = "chunk_delta_rule_warpgroups"
    template: ClassVar[str] = "chunk_delta_rule/warpgroups/chain.cu.j2"

    stages: int = 3

    @property
    def needs(self) -> Needs:
        columns = tuple(sorted({CHUNK, self.head_k}))
        return Needs(
            matrices=True, copies=self.ragged, barriers=True, maps=True, elements=self.state_loads is Loads.ELEMENT, bytes=True,
            shared_pairs=True, warpgroups=columns, panels=True, mma=self.x.value,
        )  # fmt: skip

    @property
    def mapped(self) -> dict[str, int]:
        return {"k": self.head_k, "q": self.head_k, "v": self.tile}

    @property
    def stem(self) -> str:
        return super().stem.replace("delta_chain_", "delta_chain_wg_", 1)

    def leading(self) -> ChainSpec:
        from .segments import WarpgroupLeadSpec

        return WarpgroupLeadSpec(**of_lead(self, DeltaProblem))

    def summing(self) -> ChainSpec:
        from .segments import WarpgroupSumsSpec, of_sums

        tile = TILES[-1] if self.head_k % TILES[-1] == 0 and self.head_v % TILES[-1] == 0 else ROWS
        return WarpgroupSumsSpec(**of_sums(self), tile=tile, stages=self.stages)

    def ending(self, transitions: bool) -> ChainSpec:
        from ...engine.chunks.segments import of_ends
        from .segments import WarpgroupEndsSpec, of_sums

        wide = self.head_k % TILES[-1] == 0 and self.head_v % TILES[-1] == 0 and transitions
        return WarpgroupEndsSpec(**of_ends(of_sums(self), transitions), tile=TILES[-1] if wide else ROWS, stages=self.stages)

    @property
    def stage_bytes(self) -> int:
        """k, q, v, T, P with room for all rows of their panels, and coefficients, each from a multiple of 1024 on."""
        return CHUNK * 2 * (2 * self.head_k + self.tile) + 2 * PANELS * PANEL_BYTES[0] + -(-4 * COEFFICIENTS // 1024) * 1024

    @property
    def dynamic_bytes(self) -> int:
        return self.stages * self.stage_bytes + CHUNK * 2 * self.tile

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"stage_words": self.stage_bytes // 4}


def _spec(problem: DeltaProblem, **how: Any) -> WarpgroupChainSpec:
    return WarpgroupChainSpec(**of_problem(problem, DeltaProblem), **how)


def warpgroup_space(problem: DeltaProblem, arch: Arch) -> Iterator[WarpgroupChainSpec]:
    """Every legal variant within the axes worth trying."""
    return variants(partial(_spec, problem), arch)


def by_warpgroups(problem: DeltaProblem, heads: int, edge: dict[str, Any]) -> Iterator[tuple[str, WarpgroupChainSpec | None, str]]:
    """(rule, spec, ""), best first. heads: of all sequences; edge: how its kernels wait."""
    return rules(partial(_spec, problem, **edge), problem.head_v, heads, wide=(2, 3))
