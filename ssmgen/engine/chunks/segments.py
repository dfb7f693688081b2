"""Segments: where heads are few and a prompt is long, its parts are walked side by side.

Over a segment of whole chunks the state goes from S to S M + N, V x K, rows first: N is what zeros become, M [K, K] what rows of the
identity do, with v = 0. One kernel walks the first segment, with outputs; beside it another makes N and M of all others but the last; a
third one joins them, S <- S M + N in f32, one segment after the other; then the chain walks all but the first at once, each from its own
state, and writes outputs.

The two that run beside each other are launches one after the other, of which the first lets the second start as soon as there are images.
That one reads and writes nothing that the first one writes, and waits for it when it is done: so who waits for the second has both.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...calls.scalars import integer
from ...spec.kernel import Arch, Needs, Pdl, must
from .kernels import ChunkKernel, Counts
from .problem import CHUNK, Divided, cut_from
from .warpgroups import ROWS, SMS

MOST = 1024  # that a call may ask for
SEGMENTS = integer(f"an integer from 1 to {MOST}", 1, MOST)
LEAST = 16  # chunks of a segment, as the rule has it: below, starts of blocks and the join take what the segments save
FEWEST = 2  # segments behind the first, as the rule has it


def by_rule(heads: int, head_v: int, fewest: int = FEWEST) -> int:
    """Segments of a sequence behind its first one at most, by the heads of v and their sizes: as many as fill the card, if that is
    `fewest`."""
    most = SMS // (heads * -(-head_v // ROWS)) if heads and head_v else 1
    return most if most >= fewest else 1


def asked(segments: int | None, heads: int, head_v: int, longest: int, fewest: int = FEWEST) -> dict[str, Any]:
    """The fields of a problem that say it: of what a call asks for (None: the rule), where no sequence has more tokens than `longest`."""
    most, least = (by_rule(heads, head_v, fewest), LEAST) if segments is None else (segments, 1)
    cut = most > 1 and longest > (cut_from(least) - 1) * CHUNK
    return {"segments": most, "segment_chunks": least} if cut else {}


def why_not(head_v: int, heads: int, fewest: int = FEWEST) -> str:
    """Why a call's sequences are not cut."""
    if by_rule(heads, head_v, fewest) == 1:
        return f"{heads} heads of {head_v} rows fill {SMS} SMs with less than {fewest} segments: sequences are not cut"
    return f"not asked for, or no sequence has {cut_from(LEAST)} chunks of {CHUNK} tokens: none is cut"


class Join(ChunkKernel, Divided):
    """States between segments, S <- S M + N in f32. A block has some rows of one head's state, and walks the segments."""

    __slots__ = ()
    template: ClassVar[str] = "engine/chunks/join.cu.j2"
    rows: ClassVar[int] = 8
    min_blocks: ClassVar[int] = 1
    marked: ClassVar[bool] = False
    leads: ClassVar[bool] = False

    pdl: Pdl

    @property
    def needs(self) -> Needs:
        return Needs(bytes=True)

    @property
    def parts(self) -> int:
        return 4 if self.head_k <= 128 else 2

    @property
    def batch(self) -> int:
        own = self.head_k // self.parts
        return max(n for n in range(1, 33) if own % n == 0)

    @property
    def threads_per_block(self) -> int:
        return self.head_k * self.parts

    @property
    def stem(self) -> str:
        return f"{self.word}_join_k{self.head_k}v{self.head_v}_n{self.segments}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def blocks(self, counts: Counts) -> int:
        return self.candidates(counts.tokens, counts.sequences) * counts.heads * (self.head_v // self.rows)

    @property
    def shared_bytes(self) -> int:
        return 4 * self.rows * self.head_k * (1 + self.parts)

    def violations(self, arch: Arch) -> list[str]:
        return self.faults() or [
            *must(self.head_v % self.rows == 0, f"V {self.head_v} is not a multiple of {self.rows}"),
            *must(self.divided, "a sequence of one segment has nothing to join"),
            *self.common_violations(arch, self.shared_bytes),
        ]


def joining(spec: Any) -> dict[str, Any]:
    """The fields of the kernel that joins a call's segments, which its last kernel has too."""
    return {name: getattr(spec, name) for name in ("head_k", "head_v", "cu_seqlens", "segments", "segment_chunks", "pdl")}
