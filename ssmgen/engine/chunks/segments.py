"""Segments: if there are few heads and a long prompt, its segments are processed concurrently.

A segment of whole chunks takes the state S [V, K] to S M + N. N [V, K] is the final state from zeros; M [K, K] is the final state from the
identity, with v = 0. One kernel scans the first segment and writes its outputs. A second kernel concurrently computes N and M of all other
segments except the last. A third kernel joins them, S <- S M + N in f32, one segment after the other. Finally the chain scans all segments
except the first at once, each from its own state, and writes outputs.

The two concurrent kernels are consecutive launches: the first one lets the second start as soon as there are chunk images. The second one
reads and writes nothing that the first one writes, and waits for the first one at its own end. A wait for the second one thus covers both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ...calls.scalars import integer
from ...spec.kernel import LATER, Arch, Needs, Pdl, must
from .kernels import ChunkKernel, Counts
from .problem import CHUNK, Divided, cut_from
from .warpgroups import ROWS, SMS

MOST = 1024  # the largest number that a call may request
SEGMENTS = integer(f"an integer from 1 to {MOST}", 1, MOST)
LEAST = 16  # chunks of a segment, by the rule: shorter segments save less than block starts and the join cost
FEWEST = 2  # segments after the first, by the rule


def by_rule(heads: int, head_v: int, fewest: int = FEWEST) -> int:
    """The largest number of segments after the first one of a sequence, from the heads of v and their size: as many as fill the card, or 1
    if that is less than `fewest`."""
    most = SMS // (heads * -(-head_v // ROWS)) if heads and head_v else 1
    return most if most >= fewest else 1


def asked(segments: int | None, heads: int, head_v: int, longest: int, fewest: int = FEWEST) -> dict[str, Any]:
    """The fields of a problem for segments. `segments` is the call's request (None: the rule); no sequence is longer than `longest`."""
    most, least = (by_rule(heads, head_v, fewest), LEAST) if segments is None else (segments, 1)
    cut = most > 1 and longest > (cut_from(least) - 1) * CHUNK
    return {"segments": most, "segment_chunks": least} if cut else {}


def why_not(head_v: int, heads: int, fewest: int = FEWEST) -> str:
    """Why a call's sequences are not split."""
    if by_rule(heads, head_v, fewest) == 1:
        return f"{heads} heads of {head_v} rows fill {SMS} SMs with fewer than {fewest} segments: sequences are not cut"
    return f"the call asks for one segment, or no sequence has {cut_from(LEAST)} chunks of {CHUNK} tokens: no sequence is cut"


J = TypeVar("J", bound="Join")


@dataclass(frozen=True, kw_only=True)
class Join(ChunkKernel, Divided):
    """States between segments, S <- S M + N in f32. A block has some rows of one head's state, and loops over the segments."""

    template: ClassVar[str] = "engine/chunks/join.cu.j2"
    rows: ClassVar[int] = 8
    min_blocks: ClassVar[int] = 1
    marked: ClassVar[bool] = False
    leads: ClassVar[bool] = False

    head_v: int
    segments: int = field(default=2, metadata=LATER)
    segment_chunks: int = field(default=1, metadata=LATER)

    @classmethod
    def of(cls: type[J], spec: Any, **more: Any) -> J:
        """The kernel that joins the segments of a call, whose last kernel is `spec`. more: fields that differ."""
        same = ("head_k", "head_v", "cu_seqlens", "segments", "segment_chunks", "pdl")
        return cls(**{name: getattr(spec, name) for name in same} | more)

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
            *must(self.head_v % self.rows == 0, f"V is {self.head_v}; expected a multiple of {self.rows}"),
            *must(self.divided, f"segments is {self.segments}; expected 2 or more for the kernel that joins them"),
            *self.common_violations(arch, self.shared_bytes),
        ]
