"""The chain of chunk_linear_attention by warpgroups: the tensor cores of sm_90a, which read operands from shared memory by themselves.

A block has a warpgroup that fetches, one that writes o, and one for every 64 rows of the state, which it holds in f32, in the registers in
which products are summed. Everything is made transposed: the state, X and u, rounded, are there as first operands, and nothing
passes between the warps that make them. Where something reads the state, what the next state does not wait for, S Q^T and P u, is asked
for where it would wait; otherwise chunks hang together by the state alone, which is summed up while o is laid down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ...spec import Arch, Loads, Needs, Pdl, must
from .chain import ChainSpec
from .problem import LinearPromptProblem, Rule
from .spec import of_problem

ROWS = 64  # of a state, that a warpgroup holds
SMS = 132  # of an H100 or H200
TILES = (64, 128)
# {(tile, K): those of threads that fetch, that write, and that hold the state}. A warpgroup of the last has 64 rows.
REGISTERS = {(64, 64): (56, 88, 240), (64, 128): (56, 88, 240), (128, 64): (56, 56, 200), (128, 128): (48, 32, 216)}


@dataclass(frozen=True, kw_only=True)
class WarpgroupChainSpec(ChainSpec):
    """A problem, and how warpgroups compute it. No choice here changes a bit of the result; those of the other chain are others."""

    family: ClassVar[str] = "chunk_linear_attention_warpgroups"
    template: ClassVar[str] = "chunk_linear_attention/warpgroups/chain.cu.j2"

    stages: int = 3
    fetchers: int = 1

    @property
    def needs(self) -> Needs:
        columns = tuple(sorted({self.rule.tokens, self.head_k}))
        return Needs(
            matrices=True, copies=self.ragged, barriers=True, maps=True, elements=self.state_loads is Loads.ELEMENT, bytes=True,
            shared_pairs=True, places=True, placed_stores=True, warpgroups=columns, panels=True, mma=self.x.value,
        )  # fmt: skip

    @property
    def mapped(self) -> dict[str, int]:
        return {"v": self.tile}

    @property
    def order(self) -> tuple[str | int, ...]:
        return (self.family,)

    @property
    def threads_per_block(self) -> int:
        return 128 * (2 + self.tile // ROWS)

    @property
    def stem(self) -> str:
        return super().stem.replace("linear_chain_", "linear_chain_wg_", 1)

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of the stages, whose parts begin at multiples of 1024 bytes, and o."""
        return super().dynamic_bytes + self.rule.tokens * 2 * self.tile

    @property
    def shared_bytes(self) -> int:
        """Beside those, barriers, and what it takes to begin at a multiple of 1024."""
        return self.dynamic_bytes + 1024

    def violations(self, arch: Arch) -> list[str]:
        if problems := self.faults():
            return problems
        return [
            *must(str(arch) == "sm_90a", f"products of warpgroups need sm_90a, not {arch}"),
            *must(self.tile in TILES, f"tile {self.tile} is not 64 or 128"),
            *must(self.tile not in TILES or self.head_v % self.tile == 0, f"tile {self.tile} does not divide V {self.head_v}"),
            *must(self.head_k in (64, 128), f"K {self.head_k} is not 64 or 128"),
            *must(self.tile == ROWS or not self.marked, "states at positions, with 128 rows of a block, leave too few registers"),
            *must(
                self.tile != 2 * ROWS or self.head_k == 64 or self.rule not in (Rule.DELTA, Rule.OLD),
                "64 rows of a chunk that read 128 columns, with 128 rows of a block, leave too few registers",
            ),
            *must(self.copy == 16, "v or out do not begin at multiples of 16 bytes"),
            *must(2 <= self.stages <= 4, f"stages {self.stages} are not 2 … 4"),
            *must(self.min_blocks == 1, f"min_blocks {self.min_blocks} is not 1: roles of warps have registers of their own"),
            *must(self.fetchers == 1, f"fetchers {self.fetchers} is not 1: it is a warpgroup that fetches"),
            *self.common_violations(arch, self.shared_bytes),
        ]

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"registers": REGISTERS[self.tile, self.head_k], "tile_rows": self.rule.tokens}


def _spec(problem: LinearPromptProblem, **how: Any) -> WarpgroupChainSpec:
    return WarpgroupChainSpec(**of_problem(problem, LinearPromptProblem), **how)


def warpgroup_space(problem: LinearPromptProblem, arch: Arch) -> Iterator[WarpgroupChainSpec]:
    """Every legal variant within the axes worth trying."""
    for tile in TILES:
        for stages in (2, 3, 4):
            for ahead in Pdl:
                spec = _spec(problem, tile=tile, stages=stages, pdl=Pdl.TRIGGER_LOADED, ahead_pdl=ahead)
                if not spec.violations(arch):
                    yield spec


def by_warpgroups(problem: LinearPromptProblem, heads: int, edge: dict[str, Any]) -> Iterator[tuple[str, WarpgroupChainSpec | None, str]]:
    """(rule, spec, ""), best first: 128 rows of a block where 64 make more blocks of one sequence than there are SMs. edge: waits."""
    tiles = (128, 64) if heads * problem.head_v > SMS * ROWS else (64,)
    for tile in tiles:
        for stages in (3, 2):
            yield f"warpgroups, {tile} rows, {stages} stages", _spec(problem, tile=tile, stages=stages, **edge), ""
