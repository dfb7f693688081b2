"""What a prompt that goes chunk by chunk can ask for, whatever its recurrence: states, packed sequences, and segments of them."""

from __future__ import annotations

from ...spec.kernel import DType, Index, must

CHUNK = 64  # tokens, of sequences that are cut into segments; part of the result's bits


class Chunked:
    """What a problem whose sequences go chunk by chunk can be asked."""

    __slots__ = ()
    cu_seqlens: Index

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens is not Index.NONE

    def faults(self) -> list[str]:
        """What no variant could serve."""
        raise NotImplementedError


class Stated:
    """What a problem with states can be asked of them."""

    __slots__ = ()
    head_v: int
    x: DType
    state: DType
    initial: bool
    final: bool
    pool: bool
    started: bool
    index: Index
    checkpoints: Index

    @property
    def marked(self) -> bool:
        """Whether states are asked for at positions."""
        return self.checkpoints is not Index.NONE

    def state_faults(self) -> list[str]:
        """What no variant could serve of v and of states."""
        return [
            *must(self.head_v % 16 == 0 and 16 <= self.head_v <= 256, f"V {self.head_v} is not 16 … 256 in steps of 16"),
            *must(not (self.pool and self.final), "a pool takes the place of final_states"),
            *must(not (self.started and self.initial), "initial_states and has_initial_state both say what a sequence starts from"),
            *must(self.pool or (self.index is Index.NONE and not self.started), "slots and has_initial_state are of a pool"),
        ]


# The first segment of a sequence, which is walked while others are summed, has so many chunks for so many of each of these: to sum a chunk
# takes longer than to walk it.
LEAD = (9, 8)


def cut_from(least: int) -> int:
    """Chunks from which on a sequence is cut into segments of at least so many: three of them, or of single chunks two."""
    return 3 * least if least > 1 else 2


class Divided:
    """How sequences are cut into segments: by their own lengths, and by fields of a problem or of a kernel's spec."""

    __slots__ = ()
    head_k: int
    head_v: int
    segments: int
    segment_chunks: int

    @property
    def divided(self) -> bool:
        """Whether sequences may be cut."""
        return self.segments > 1

    @property
    def span(self) -> int:
        """Tokens of the shortest sequence that is cut."""
        return (cut_from(self.segment_chunks) - 1) * CHUNK + 1

    @property
    def lead(self) -> tuple[int, int]:
        """Chunks of a first segment, for so many of each other."""
        return LEAD

    def cut(self, chunks: int) -> tuple[int, int, int]:
        """(segments, chunks of the first, of each other but the last) of a sequence of so many chunks."""
        if not self.divided or chunks < cut_from(self.segment_chunks):
            return 1, chunks, 0
        ahead, behind = self.lead
        count = min(self.segments, chunks // self.segment_chunks - 1)
        each = -(-chunks * behind // (ahead + count * behind))
        first = each * ahead // behind
        return 1 - (first - chunks) // each, first, each

    def candidates(self, tokens: int, sequences: int) -> int:
        """Sequences that may be cut, of so many of so many tokens in all. Where fewer than all may be, a sequence that is cut is the one
        with the candidate's number ceil(begin / span), where begin is its first token: no two have the same."""
        return min(sequences, -(-tokens // self.span)) if self.divided else 0

    @property
    def room(self) -> int:
        """f32 numbers of a segment and head in the workspace: N, then M; of a first segment, the state that it leaves."""
        return (self.head_v + self.head_k) * self.head_k
