"""The short convolution inside a decode layer's kernel, which runs it before the recurrence.

A block convolves the channels that its rows need: the channels of its group of heads, which other blocks need too, and its own. If several
blocks read a channel, the last of them to arrive writes its window; `arrivals` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..spec.kernel import LATER, DType, Index, Loads, Part, must
from .window import MAX_WIDTH, Saved, StateLayout, Windowed

CHANNELS = 4  # neighbouring channels per thread
MAX_TOKENS = 8  # of a sequence; all of them are staged at once
MAX_COLUMNS = 32  # candidate start slots of a sequence; each is read by one lane of a warp


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv(Part, Windowed):
    """The convolution in a call's problem. Inputs and window have one dtype, and results are rounded to it."""

    width: int = 4  # taps
    weight: DType = DType.BF16
    bias: DType | None = None
    len: int = 3  # inputs of a channel that conv_state holds
    layout: StateLayout = StateLayout.RUNS
    loads: Loads = Loads.VECTOR  # of the inputs
    taps: Loads = Loads.VECTOR  # of weight and bias
    tokens: int = field(default=0, metadata=LATER)  # of a sequence, in calls with an axis of tokens; 0 in calls without it
    windows: Saved = field(default=Saved.NO, metadata=LATER)  # layout of the windows after each token: [rows, tokens, channels, width - 1]
    rows: Index = field(default=Index.NONE, metadata=LATER)  # type of the row numbers in that buffer

    @property
    def saves(self) -> bool:
        """Whether the window after each token is saved."""
        return self.windows is not Saved.NO

    @property
    def saves_any(self) -> bool:
        """Whether the saved windows have arbitrary strides."""
        return self.windows is Saved.ANY

    def faults(self, rolls: bool) -> list[str]:
        """Constraints that no variant can meet. rolls: the window's history begins after the accepted tokens of the last call."""
        return [
            *must(2 <= self.width <= MAX_WIDTH, f"conv_width is {self.width}; expected 2 … {MAX_WIDTH}"),
            *(self._faults_of_rolling() if rolls else self._faults_of_length()),
            *must(0 <= self.tokens <= MAX_TOKENS, f"conv_tokens is {self.tokens}; expected 0 … {MAX_TOKENS}"),
            *must(
                self.tokens > 0 or not self.saves, f"conv_windows is {self.windows.value} and conv_tokens is 0; expected 1 or more tokens"
            ),
            *must(self.saves or self.rows is Index.NONE, f"conv_rows is {self.rows.value} and conv_windows is no; expected saved windows"),
        ]

    def _faults_of_length(self) -> list[str]:
        width = self.width
        return must(
            self.len in (width - 1, width),
            f"conv_state holds {self.len} inputs per channel; expected {width - 1} or {width} for width {width}",
        )

    def _faults_of_rolling(self) -> list[str]:
        least = self.rolled_len
        return [
            *must(self.len >= least, f"conv_state holds {self.len} inputs per channel; expected {least} or more with num_accepted_tokens"),
            *must(
                self.layout is not StateLayout.RUNS or self.len == least,
                f"conv_state holds runs of {self.len} inputs; expected {least}, since a kernel rewrites the whole run",
            ),
        ]

    @property
    def rolled_len(self) -> int:
        """The least number of inputs in a window when tokens are added and some of them may be rejected."""
        return self.width - 2 + self.tokens
