"""What a call of selective_scan fixes, and what it may be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ...spec import DType, Index, Loads, Problem, must

OPERATOR = "selective_scan"
MAX_STATE = 256


class Order(Enum):
    """Which axis of [tokens, channels], or of [tokens, d_state], is contiguous."""

    FIRST = "first"  # tokens: channels, or states, come first
    LAST = "last"  # channels, or states


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveProblem(Problem):
    """What a call fixes: dtypes, size of a channel's state, which operands there are. Channels, groups and tokens are not among it."""

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

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens is not Index.NONE

    @property
    def padded(self) -> int:
        """States of a channel as they are summed: a power of two of quads; those beyond d_state are 0."""
        return 4 << max(0, (self.d_state - 1) // 4).bit_length()

    def faults(self) -> list[str]:
        """What no variant could serve."""
        return [
            *must(1 <= self.d_state <= MAX_STATE, f"d_state {self.d_state} is not 1 … {MAX_STATE}"),
            *must(
                self.copy in (0, 4, 8, 16) and self.key_copy in (0, 4, 8, 16),
                f"copies of {self.copy} and {self.key_copy} bytes are not of 0, 4, 8 or 16",
            ),
            *must(not (self.pool and self.final), "a pool takes the place of final_states"),
            *must(not (self.started and self.initial), "initial_states and has_initial_state both say what a sequence starts from"),
            *must(self.pool or (self.index is Index.NONE and not self.started), "slots and has_initial_state are of a pool"),
        ]
