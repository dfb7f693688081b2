"""The fields that a call of selective_scan fixes, and their legal values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...engine.chunks.problem import Chunked, Stated
from ...spec.kernel import LATER, DType, Index, Loads, Problem, must

OPERATOR = "selective_scan"
MAX_STATE = 256

# If a sequence has few channels, the blocks of a cluster scan parts of it in parallel. It is cut by its own length, at multiples of CUT
# tokens, which all tiles divide: the cut does not depend on the variant.
CUT = 128
MOST = 8  # parts
LEAST = 256  # tokens of a part by the rule. There are at least four parts: with P parts, a sequence takes the time of two of them
FEWEST = 8  # least parts by the rule: fewer save too little for the work that they add
OF_BLOCK, BLOCKS_OF_CARD = 512, 2 * 132  # states of a block's channels by the rule; blocks: two for each SM of an H200
MOST_PADDED = 64  # most states of a channel that parts exchange


def by_rule(dim: int, padded: int) -> int:
    """Most parts of a sequence, by its channels and the states of each: the number that is on the card at once."""
    most = min(MOST, BLOCKS_OF_CARD // -(-dim * padded // OF_BLOCK)) if dim else 1
    return most if most >= FEWEST else 1


def asked(segments: int | None, dim: int, d_state: int, longest: int) -> dict[str, Any]:
    """The fields of a problem that fix how sequences of at most `longest` tokens are cut: by the call, or by the rule if it gives None."""
    padded = padded_states(d_state)
    most, least = (by_rule(dim, padded), LEAST) if segments is None else (min(segments, MOST), CUT)
    cut = most > 1 and padded <= MOST_PADDED and longest >= cut_from(least)
    return {"segments": most, "segment_tokens": least} if cut else {}


def cut_from(least: int) -> int:
    """Least tokens of a sequence that is cut into parts of at least `least` tokens."""
    return 2 * CUT if least <= CUT else 4 * least


def padded_states(d_state: int) -> int:
    """States of a channel in the sum: a power of two of quads; states beyond d_state are 0."""
    return 4 << max(0, (d_state - 1) // 4).bit_length()


class Order(Enum):
    """Which axis of [tokens, channels], or of [tokens, d_state], is contiguous."""

    FIRST = "first"  # tokens: channels, or states, come first
    LAST = "last"  # channels, or states


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveProblem(Problem, Chunked, Stated):
    """The fields that a call fixes: dtypes, size of a channel's state, present operands. Channels, groups and tokens are not fixed."""

    d_state: int
    layout: Order = Order.LAST  # of u, delta, z and out
    copy: int = 16  # contiguous and aligned bytes of these; 0: single elements, at any strides along both axes
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
    pool: bool = False  # `state` is written instead of final_states, and read if has_initial_state is true
    started: bool = False  # has_initial_state is given
    index: Index = Index.NONE  # type of state_indices
    state_loads: Loads = Loads.VECTOR  # of states: four elements at once
    segments: int = field(default=1, metadata=LATER)  # of a sequence, at most
    segment_tokens: int = field(default=CUT, metadata=LATER)  # of a segment, at least: a short sequence has fewer segments

    @property
    def padded(self) -> int:
        return padded_states(self.d_state)

    def cut(self, tokens: int) -> tuple[int, int]:
        """(parts, tokens of each part except the last) of a sequence of `tokens` tokens."""
        if self.segments == 1 or tokens < cut_from(self.segment_tokens):
            return 1, tokens
        most = min(self.segments, tokens // self.segment_tokens)
        each = -(-tokens // (most * CUT)) * CUT
        return -(-tokens // each), each

    def faults(self) -> list[str]:
        """Reasons why no variant can serve this problem."""
        return [
            *must(1 <= self.d_state <= MAX_STATE, f"d_state is {self.d_state}; expected 1 … {MAX_STATE}"),
            *must(
                self.copy in (0, 4, 8, 16) and self.key_copy in (0, 4, 8, 16),
                f"copy is {self.copy} and key_copy {self.key_copy}; expected 0, 4, 8 or 16 bytes",
            ),
            *self.state_faults(),
            *must(1 <= self.segments <= MOST, f"segments is {self.segments}; expected 1 … {MOST}"),
            *must(self.segment_tokens >= CUT, f"segment_tokens is {self.segment_tokens}; expected {CUT} or more"),
        ]
