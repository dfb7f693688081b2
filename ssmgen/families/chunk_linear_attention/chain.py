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
from typing import Any, ClassVar, NamedTuple

from ...engine.chunks.chain import Chain
from ...engine.chunks.kernels import of_problem
from ...engine.chunks.variants import Variants
from ...engine.chunks.warpgroups import ROWS
from ...engine.recurrences.attention.problem import Beta, Gate
from ...spec.kernel import Arch, KernelSpec, Loads, Needs, must
from .operands import OF_OWN_TYPE
from .prepare import PrepareSpec
from .problem import MAX_SIZE, OPERATOR, PANEL, PANELS, SIZE, Image, ImageProblem, LinearPromptProblem, Rule
from .problem import ROWS as ROWS_OF_CHUNK
from .spec import FEWEST, JoinSpec, LinearSpec

# The layout of a chunk's parts in shared memory, by reader: warps or warpgroups, for outputs or for N and M alone.

HALF = 32  # rows of T in one product's sums: a whole chunk's rows would take a quarter more products, and more room for zeros
Piece = tuple[int, int, int]  # first byte in an image, bytes, first word in shared memory


class Stage(NamedTuple):
    """Start of a chunk's parts in shared memory after E, and their size, in words. Decays follow all chunks."""

    q: int
    w: int
    t: int
    rest: int
    p: int
    v: int
    words: int


def of_warps(image: Image, v_words: int, sums: bool) -> tuple[Stage, list[Piece]]:
    """The parts in the order of an image; sums need neither Q nor P."""
    if not sums:
        v = image.decay // 4
        return Stage(image.q // 4, image.w // 4, image.t // 4, image.rest // 4, image.p // 4, v, v + v_words), [(0, image.decay, 0)]
    w, without_q = image.q // 4, (image.w - image.q) // 4
    v = image.p // 4 - without_q
    found = Stage(0, w, image.t // 4 - without_q, image.rest // 4 - without_q, 0, v, v + v_words)
    return found, [(0, image.q, 0), (image.w, image.p - image.w, w)]


def of_warpgroups(image: Image, rule: Rule, v_words: int, sums: bool) -> tuple[Stage, list[Piece]]:
    """Whole panels of P, and halves of T's panels, with room for zeros. Parts begin at multiples of 1024 bytes."""
    halves = sum(half_words(rule))
    if sums:
        w = image.q // 4
        v = w + (image.t - image.w) // 4
        t = v + v_words
        rest = t + halves
        pieces = [(0, image.q, 0), (image.w, image.t - image.w, w), (image.rest, image.p - image.rest, rest)]
        found = Stage(0, w, t, rest, 0, v, rest + (image.p - image.rest) // 4)
        return found, joined([*pieces, *panels(image.t, t, rule, half_words(rule))])
    v = image.t // 4
    t = v + v_words
    rest = t + halves * rule.reads
    p = rest + (image.p - image.rest) // 4 * rule.weighs
    words = rule.tokens * PANEL // 2
    pieces = [(0, image.t, 0), *panels(image.p, p, rule, (words,) * PANELS)]
    if rule.reads:
        pieces += panels(image.t, t, rule, half_words(rule))
    if rule.weighs:
        pieces.append((image.rest, image.p - image.rest, rest))
    return Stage(image.q // 4, image.w // 4, t, rest, p, v, p + PANELS * words), joined(pieces)


def half_words(rule: Rule) -> tuple[int, ...]:
    """32-bit words of T's panels, each from the half of 32 rows where its first column crosses the diagonal."""
    return tuple((ROWS_OF_CHUNK - max(rule.silent, PANEL * c // HALF * HALF)) * PANEL // 2 for c in range(PANELS))


def panels(begin: int, at: int, rule: Rule, words: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Pieces of T's or P's panels. They start at `begin` in an image and take `words` each in shared memory, zeros first."""
    found = []
    for c, count in enumerate(rule.panel_bytes):
        found.append((begin + sum(rule.panel_bytes[:c]), count, at + sum(words[: c + 1]) - count // 4))
    return found


def joined(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The pieces, with neighbours in both places merged."""
    found: list[tuple[int, int, int]] = []
    for piece in sorted(pieces):
        last, size, there = found[-1] if found else (-1, 0, 0)
        if (last + size, there + size // 4) == (piece[0], piece[2]):
            found[-1] = last, size + piece[1], there
        else:
            found.append(piece)
    return found


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
