"""The chain of chunk_delta_rule by warpgroups: the tensor cores of sm_90a, which read operands from shared memory by themselves.

A block has a warpgroup that fetches, one that writes o, and one for every 64 rows of the state, which it holds in f32, in the registers in
which products are summed. Everything is made transposed: the state, X and u, rounded, are there as first operands, and nothing
passes between the warps that make them. What the state does not wait for, S q^T and P u, is asked for where it would wait; or, with
`readers`, made by the warpgroup that writes o, to which S and u are handed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from ...spec import LATER, Arch, Loads, Needs, must
from .by_warpgroups import ROWS, TILES, ByWarpgroups, rules, variants
from .chain import ChainSpec
from .problem import CHUNK, COEFFICIENTS, PANEL_BYTES, PANELS, DeltaProblem
from .spec import of_problem

ORDER: dict[str, Any] = {}  # of products, in the rule's blocks of 64 rows: {}, {"readers": 1} or {"woven": True}, and "paired"
READING = (56, 152, 240)  # registers of threads that fetch, that make o from what they are handed, and that hold the state


@dataclass(frozen=True, kw_only=True)
class WarpgroupChainSpec(ByWarpgroups, ChainSpec):
    """A problem, and how warpgroups compute it. No choice here changes a bit of the result; those of the other chain are others."""

    family: ClassVar[str] = "chunk_delta_rule_warpgroups"
    template: ClassVar[str] = "chunk_delta_rule/warpgroups/chain.cu.j2"

    stages: int = 3
    readers: int = field(default=0, metadata=LATER)  # warpgroups that make o, from S and u as they are handed: 0, or 1, which writes it
    paired: bool = field(default=False, metadata=LATER)  # clusters of two blocks copy k, q and images for each other
    woven: bool = field(default=False, metadata=LATER)  # S is summed up by halves of its columns; arithmetic stands behind single products

    @property
    def needs(self) -> Needs:
        columns = (CHUNK,) if self.readers or self.woven else tuple(sorted({CHUNK, self.head_k}))
        return Needs(
            matrices=True, copies=self.ragged, barriers=True, maps=True, elements=self.state_loads is Loads.ELEMENT, bytes=True,
            shared_pairs=True, warpgroups=columns, panels=True, meetings=self.readers > 0,
            multicast=self.paired, mma=self.x.value,
        )  # fmt: skip

    @property
    def mapped(self) -> dict[str, int]:
        columns = ROWS if self.paired else self.head_k
        return {"k": columns, "q": columns, "v": self.tile}

    @property
    def cluster_blocks(self) -> int:
        return 2 if self.paired else 1

    @property
    def stem(self) -> str:
        order = "r" * self.readers + "w" * self.woven + "p" * self.paired
        return super().stem.replace("delta_chain_", f"delta_chain_wg_{order}{'_' * bool(order)}", 1)

    def summing(self) -> ChainSpec:
        from .segments import WarpgroupSumsSpec, of_sums

        tile = TILES[-1] if self.head_k % TILES[-1] == 0 and self.head_v % TILES[-1] == 0 else ROWS
        return WarpgroupSumsSpec(**of_sums(self), tile=tile, stages=self.stages)

    @property
    def stage_bytes(self) -> int:
        """k, q, v, T, P with room for all rows of their panels, and coefficients, each from a multiple of 1024 on."""
        return CHUNK * 2 * (2 * self.head_k + self.tile) + 2 * PANELS * PANEL_BYTES[0] + -(-4 * COEFFICIENTS // 1024) * 1024

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of the stages, of o, and of S and u as they are handed over."""
        return self.stages * self.stage_bytes + CHUNK * 2 * self.tile + self.readers * ROWS * 2 * (self.head_k + CHUNK)

    def violations(self, arch: Arch) -> list[str]:
        pairs = self.head_k == 128 and self.tile == ROWS and self.head_v % 128 == 0
        ordered = self.readers > 0 or self.woven
        return [
            *super().violations(arch),
            *must(self.readers in (0, 1), f"readers {self.readers} are not 0 or 1"),
            *must(not (self.readers and self.woven), "readers or woven: either says who makes o's products, and when"),
            *must(pairs or not self.paired, f"paired blocks have {ROWS} rows and K 128, and V is a multiple of 128"),
            *must(self.tile == ROWS or not ordered, f"readers and woven are of {ROWS} rows: with {self.tile} there are too few registers"),
        ]

    def constants(self) -> dict[str, Any]:
        more = {"registers": READING} if self.readers else {}
        return super().constants() | {"stage_words": self.stage_bytes // 4} | more


def _spec(problem: DeltaProblem, **how: Any) -> WarpgroupChainSpec:
    return WarpgroupChainSpec(**of_problem(problem, DeltaProblem), **how)


def warpgroup_space(problem: DeltaProblem, arch: Arch) -> Iterator[WarpgroupChainSpec]:
    """Every legal variant within the axes worth trying."""
    for order in ({}, {"readers": 1}, {"woven": True}, {"woven": True, "paired": True}, {"readers": 1, "paired": True}):
        yield from variants(partial(_spec, problem, **order), arch)


def by_warpgroups(problem: DeltaProblem, heads: int, edge: dict[str, Any]) -> Iterator[tuple[str, WarpgroupChainSpec | None, str]]:
    """(rule, spec, ""), best first. edge: how its kernels wait."""

    pairs = problem.head_k == 128 and problem.head_v % 128 == 0
    order = {name: value for name, value in ORDER.items() if pairs or name != "paired"}

    def make(tile: int, stages: int) -> WarpgroupChainSpec:
        return _spec(problem, tile=tile, stages=stages, **edge, **(order if tile == ROWS else {}))

    return rules(make, problem.head_v, heads)
