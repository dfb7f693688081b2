"""Problems of chunked prompts, for any recurrence: states, packed sequences, and their segments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...spec.kernel import LATER, DType, Index, Layout, Loads, Problem, must

CHUNK = 64  # tokens, for sequences that are split into segments; the result's bits depend on it


class Chunked:
    """Part of a problem whose sequences are processed chunk by chunk."""

    __slots__ = ()
    cu_seqlens: Index

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens is not Index.NONE

    def faults(self) -> list[str]:
        """Constraints that no variant can meet."""
        raise NotImplementedError


def chunks_of(tokens: int, sequences: int, chunk: int) -> int:
    """Count of chunk numbers for `tokens` tokens in all, `chunk` of them in a chunk: enough for any start positions of the sequences.

    Chunk n of sequence s has the number begin(s) // chunk + s + n, where begin(s) is its first token. Numbers are unique, and need no sum
    over sequences. Unused numbers are skipped.
    """
    return tokens // chunk + sequences


class Stated:
    """Part of a problem with states."""

    __slots__ = ()
    x: DType
    state: DType
    initial: bool
    final: bool
    pool: bool
    started: bool
    index: Index
    checkpoints: Index
    copy: int
    state_loads: Loads

    @property
    def marked(self) -> bool:
        """Whether checkpoints, the states at given positions, are requested."""
        return self.checkpoints is not Index.NONE

    def state_constants(self) -> dict[str, Any]:
        """How templates name the states, and how they load them."""
        return {
            "vector_state": self.state_loads is Loads.VECTOR,
            "pooled": self.index is not Index.NONE,
            "past": "state" if self.started else "initial_states" if self.initial else "",  # holds the state before the first token
            "past_slot": "sequence" if self.pool and self.initial else "slot",
            "kept": "state" if self.pool else "final_states" if self.final else "",  # receives the last state
        }

    def state_faults(self) -> list[str]:
        """Constraints on states that no variant can meet."""
        return [
            *must(not (self.pool and self.final), "pool and final are both yes; expected one of them: a pool receives the final states"),
            *must(
                not (self.started and self.initial),
                "initial and started are both yes; expected one of them: each says where a sequence starts",
            ),
            *must(
                self.pool or (self.index is Index.NONE and not self.started), "index or started is set without a pool; expected pool=yes"
            ),
        ]


# (chunks of the first segment, chunks of each other segment), as a ratio. The first segment is scanned while the others are summed, and
# summing a chunk takes longer than scanning it.
LEAD = (9, 8)


def cut_from(least: int) -> int:
    """The least number of chunks of a sequence that is split into segments of at least `least` chunks: three segments, or two of single
    chunks."""
    return 3 * least if least > 1 else 2


class Divided:
    """The split of sequences into segments, from their lengths and from fields of a problem or of a kernel's spec."""

    __slots__ = ()
    head_k: int
    head_v: int
    segments: int
    segment_chunks: int

    @property
    def divided(self) -> bool:
        """Whether sequences may be split."""
        return self.segments > 1

    @property
    def span(self) -> int:
        """Tokens of the shortest sequence that is split."""
        return (cut_from(self.segment_chunks) - 1) * CHUNK + 1

    @property
    def lead(self) -> tuple[int, int]:
        """The ratio of a first segment's chunks to the chunks of each other one."""
        return LEAD

    def cut(self, chunks: int) -> tuple[int, int, int]:
        """(segments, chunks of the first one, chunks of each later one except the last) for a sequence with `chunks` chunks."""
        if not self.divided or chunks < cut_from(self.segment_chunks):
            return 1, chunks, 0
        ahead, behind = self.lead
        count = min(self.segments, chunks // self.segment_chunks - 1)
        each = -(-chunks * behind // (ahead + count * behind))
        first = each * ahead // behind
        return 1 - (first - chunks) // each, first, each

    def candidates(self, tokens: int, sequences: int) -> int:
        """The number of candidates: sequences that may be split, given their number and their total tokens. If not all may be, the
        candidate of a split sequence is ceil(begin / span), where begin is its first token: these numbers are distinct."""
        return min(sequences, -(-tokens // self.span)) if self.divided else 0

    @property
    def room(self) -> int:
        """f32 numbers per segment and head in the workspace: N, then M. For a first segment: its final state."""
        return (self.head_v + self.head_k) * self.head_k

    def segment_bytes(self, tokens: int, sequences: int, heads: int) -> int:
        """Bytes of the results of segments, after the images in the workspace. Segment i of candidate c and head h is at
        ((c segments + i) heads + h) room; the last segment stores nothing."""
        return 4 * self.candidates(tokens, sequences) * self.segments * heads * self.room


@dataclass(frozen=True, kw_only=True)
class AttentionStates(Problem, Chunked, Stated, Divided):
    """The fields of an attention's problem that the images of chunks do not depend on: v, states and segments."""

    head_v: int  # channels of v and out
    state: DType = DType.F32  # of all states
    layout: Layout = Layout.VK
    initial: bool = False  # initial_states are read
    final: bool = False  # final_states are written
    pool: bool = False  # `state` is written instead of final_states, and read if has_initial_state is true
    started: bool = False  # has_initial_state is given
    index: Index = Index.NONE  # type of state_indices
    checkpoints: Index = Index.NONE  # type of checkpoint_positions; their number is an argument of the kernel
    state_loads: Loads = Loads.VECTOR  # of states: pairs of elements
    segments: int = field(default=1, metadata=LATER)  # of a sequence after its first one, at most; 1: no sequence is cut
    segment_chunks: int = field(default=1, metadata=LATER)  # of a segment, at least: a sequence of few chunks has fewer segments

    @property
    def cuts(self) -> bool:
        """Whether the rule may split sequences into segments."""
        return True

    def faults(self) -> list[str]:
        return [
            *super().faults(),
            *must(self.head_v % 16 == 0 and 16 <= self.head_v <= 256, f"V is {self.head_v}; expected 16 … 256 in steps of 16"),
            *self.state_faults(),
            *must(
                self.segments >= 1 and self.segment_chunks >= 1,
                f"segments is {self.segments} and segment_chunks {self.segment_chunks}; expected 1 or more",
            ),
        ]
