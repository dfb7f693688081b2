"""What a call of selective_scan fixes, and what it may be."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...spec.kernel import LATER, DType, Index, Loads, Problem, must

OPERATOR = "selective_scan"
MAX_STATE = 256

# Where a sequence's channels are few, parts of it are walked side by side, by the blocks of a cluster. It is cut by its own length, at
# multiples of CUT tokens, which all tiles divide: how does not hang on the variant.
CUT = 128
MOST = 8  # parts
LEAST = 256  # tokens of a part, as the rule has it. There are four at least: with P, a sequence takes the time of two of them
FEWEST = 8  # parts that the rule asks for: fewer save too little of what they add
OF_BLOCK, BLOCKS_OF_CARD = 512, 2 * 132  # states of a block's channels, as the rule has it; blocks: two for each SM of an H200
MOST_PADDED = 64  # states of a channel of which parts keep each other's


def by_rule(dim: int, padded: int) -> int:
    """Parts of a sequence at most, by its channels and the states of each: as many as are on the card at once."""
    most = min(MOST, BLOCKS_OF_CARD // -(-dim * padded // OF_BLOCK)) if dim else 1
    return most if most >= FEWEST else 1


def asked(segments: int | None, dim: int, d_state: int, longest: int) -> dict[str, Any]:
    """The fields of a problem that say how sequences are cut: as a call asks for (None: the rule), where none is longer than `longest`."""
    padded = padded_states(d_state)
    most, least = (by_rule(dim, padded), LEAST) if segments is None else (min(segments, MOST), CUT)
    cut = most > 1 and padded <= MOST_PADDED and longest >= cut_from(least)
    return {"segments": most, "segment_tokens": least} if cut else {}


def cut_from(least: int) -> int:
    """Tokens from which on a sequence is cut into parts of at least so many."""
    return 2 * CUT if least <= CUT else 4 * least


def padded_states(d_state: int) -> int:
    """States of a channel as they are summed: a power of two of quads; those beyond d_state are 0."""
    return 4 << max(0, (d_state - 1) // 4).bit_length()


class Order(Enum):
    """Which axis of [tokens, channels], or of [tokens, d_state], is contiguous."""

    FIRST = "first"  # tokens: channels, or states, come first
    LAST = "last"  # channels, or states


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveProblem(Problem):
    """The fields that a call fixes: dtypes, size of a channel's state, which operands there are. Channels, groups and tokens are not fixed."""

    d_state: int
    layout: Order = Order.LAST  # of u, delta, z and out
    copy: int = 16  # bytes of those that lie together and aligned; 0: single elements, at any distances along both axes
    key_layout: Order = Order.LAST  # of B and C
    key_copy: int = 16
    x: DType = DType.BF16  # of all of them
    D: DType | None = None
    z: bool = False
    delta_bias: DType | None = None
    delta_softplus: bool = True
    state: DType = DType.F32  # of all states
    cu_seqlens: Index = Index.NONE  # type of it: u is packed sequences
    initial: bool = False  # initial_states are read
    final: bool = False  # final_states are written
    pool: bool = False  # `state` is written, in place of final_states, and read where has_initial_state says so
    started: bool = False  # there is a has_initial_state
    index: Index = Index.NONE  # type of state_indices
    state_loads: Loads = Loads.VECTOR  # of states: four numbers at once
    segments: int = field(default=1, metadata=LATER)  # of a sequence, at most
    segment_tokens: int = field(default=CUT, metadata=LATER)  # of a segment, at least: a short sequence has fewer

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens is not Index.NONE

    @property
    def padded(self) -> int:
        return padded_states(self.d_state)

    def cut(self, tokens: int) -> tuple[int, int]:
        """(parts, tokens of each but the last) of a sequence of so many tokens."""
        if self.segments == 1 or tokens < cut_from(self.segment_tokens):
            return 1, tokens
        most = min(self.segments, tokens // self.segment_tokens)
        each = -(-tokens // (most * CUT)) * CUT
        return -(-tokens // each), each

    def faults(self) -> list[str]:
        """Reasons why no variant can serve this problem."""
        return [
            *must(1 <= self.d_state <= MAX_STATE, f"d_state {self.d_state} is not 1 … {MAX_STATE}"),
            *must(
                self.copy in (0, 4, 8, 16) and self.key_copy in (0, 4, 8, 16),
                f"copies of {self.copy} and {self.key_copy} bytes are not of 0, 4, 8 or 16",
            ),
            *must(not (self.pool and self.final), "a pool takes the place of final_states"),
            *must(not (self.started and self.initial), "initial_states and has_initial_state both say what a sequence starts from"),
            *must(1 <= self.segments <= MOST, f"segments {self.segments} are not 1 … {MOST}"),
            *must(self.segment_tokens >= CUT, f"segments of {self.segment_tokens} tokens are less than {CUT}"),
            *must(self.pool or (self.index is Index.NONE and not self.started), "slots and has_initial_state are of a pool"),
        ]
