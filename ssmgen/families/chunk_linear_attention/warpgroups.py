"""The chain of chunk_linear_attention by warpgroups: the tensor cores of sm_90a, which read operands from shared memory by themselves.

A block has a warpgroup that fetches, one that writes o, and one for every 64 rows of the state, which it holds in f32, in the registers in
which products are summed. Everything is made transposed: the state, X and u, rounded, are there as first operands, and nothing
passes between the warps that make them. Where something reads the state, what the next state does not wait for, S Q^T and P u, is asked
for where it would wait; otherwise chunks hang together by the state alone, which is summed up while o is laid down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ...engine.chunks.kernels import of_lead, of_problem
from ...engine.chunks.warpgroups import ROWS, TILES, ByWarpgroups, rules, variants
from ...spec import Arch, Loads, Needs, must
from .chain import ChainSpec, Stage
from .problem import PANEL, PANELS, LinearPromptProblem, Rule
from .problem import ROWS as ROWS_OF_CHUNK

HALF = 32  # rows of T in one product's sums: those of a whole chunk would be a quarter more products, and need more room for zeros


@dataclass(frozen=True, kw_only=True)
class WarpgroupChainSpec(ByWarpgroups, ChainSpec):
    """A problem, and how warpgroups compute it. No choice here changes a bit of the result; those of the other chain are others."""

    family: ClassVar[str] = "chunk_linear_attention_warpgroups"
    template: ClassVar[str] = "chunk_linear_attention/warpgroups/chain.cu.j2"

    stages: int = 3
    fetchers: int = 1

    @property
    def needs(self) -> Needs:
        columns = tuple(sorted({self.rule.tokens, self.head_k} | ({HALF} if self.rule.reads else set())))
        return Needs(
            matrices=True, copies=self.ragged, barriers=True, maps=True, elements=self.state_loads is Loads.ELEMENT, bytes=True,
            shared_pairs=True, places=True, placed_stores=True, warpgroups=columns, panels=True, mma=self.x.value,
        )  # fmt: skip

    @property
    def mapped(self) -> dict[str, int]:
        return {"v": self.tile}

    @property
    def stage(self) -> Stage:
        """As whole panels of P, and halves of T's: with room for what is zero. Parts begin at multiples of 1024 bytes."""
        image, rows = self.image, self.rule.tokens
        v = image.t // 4
        t = v + rows * self.v_words
        rest = t + sum(half_words(self.rule)) * self.rule.reads
        p = rest + (image.p - image.rest) // 4 * self.rule.weighs
        return Stage(image.q // 4, image.w // 4, t, rest, p, v, p + PANELS * rows * PANEL // 2)

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        image, stage, rule = self.image, self.stage, self.rule
        found = [(0, image.t, 0), *panels(image.p, stage.p, rule, (rule.tokens * PANEL // 2,) * PANELS)]
        if rule.reads:
            found += panels(image.t, stage.t, rule, half_words(rule))
        if rule.weighs:
            found.append((image.rest, image.p - image.rest, stage.rest))
        return joined(found)

    @property
    def stem(self) -> str:
        return super().stem.replace("linear_chain_", "linear_chain_wg_", 1)

    def leading(self) -> ChainSpec:
        from .segments import WarpgroupLeadSpec

        return WarpgroupLeadSpec(**of_lead(self, LinearPromptProblem))

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
    def dynamic_bytes(self) -> int:
        """Bytes of the stages, whose parts begin at multiples of 1024 bytes, and o."""
        return super().dynamic_bytes + self.rule.tokens * 2 * self.tile

    def violations(self, arch: Arch) -> list[str]:
        return super().violations(arch) + must(
            self.tile != 2 * ROWS or self.head_k == 64 or not self.rule.weighs or self.sums,
            "64 rows of a chunk that read 128 columns, with 128 rows of a block, leave too few registers",
        )

    def constants(self) -> dict[str, Any]:
        words, base = half_words(self.rule), super().constants()
        if self.rule.weighs and self.marked and self.tile == ROWS:
            base["registers"] = WEIGHING
        return base | {"tile_rows": self.rule.tokens, "half": HALF, "half_panels": [sum(words[:c]) for c in range(PANELS)]}


# Of a warp that fetches, that writes o, and that holds the state, where u has a second term and states at positions are wanted: with 240 of
# the last some variants spill.
WEIGHING = (56, 88, 248)


def half_words(rule: Rule) -> tuple[int, ...]:
    """32-bit words of T's panels, each from the half of 32 rows on that its first column crosses the diagonal in."""
    return tuple((ROWS_OF_CHUNK - max(rule.silent, PANEL * c // HALF * HALF)) * PANEL // 2 for c in range(PANELS))


def panels(begin: int, at: int, rule: Rule, words: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Pieces of T's or P's panels, which begin there in an image, and in shared memory take so many words each, zeros first."""
    found = []
    for c, count in enumerate(rule.panel_bytes):
        found.append((begin + sum(rule.panel_bytes[:c]), count, at + sum(words[: c + 1]) - count // 4))
    return found


def joined(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Pieces that lie together in both places as one."""
    found: list[tuple[int, int, int]] = []
    for piece in sorted(pieces):
        last, size, there = found[-1] if found else (-1, 0, 0)
        if (last + size, there + size // 4) == (piece[0], piece[2]):
            found[-1] = last, size + piece[1], there
        else:
            found.append(piece)
    return found


def _spec(problem: LinearPromptProblem, **how: Any) -> WarpgroupChainSpec:
    return WarpgroupChainSpec(**of_problem(problem, LinearPromptProblem), **how)


def warpgroup_space(problem: LinearPromptProblem, arch: Arch) -> Iterator[WarpgroupChainSpec]:
    """Every legal variant within the axes worth trying."""
    return variants(partial(_spec, problem), arch)


def by_warpgroups(problem: LinearPromptProblem, heads: int, edge: dict[str, Any]) -> Iterator[tuple[str, WarpgroupChainSpec | None, str]]:
    """(rule, spec, ""), best first. edge: how its kernels wait."""
    return rules(partial(_spec, problem, **edge), problem.head_v, heads)
