"""The short convolution that a decode layer's kernel does itself, ahead of its recurrence.

A block convolves the channels that its rows need: those of its group of heads, which other blocks need too, and its own. The window of a
channel that several blocks read is written by the block of them that comes last, which `arrivals` counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..spec.kernel import LATER, DType, Index, Loads, Part, must
from .window import MAX_WIDTH, Saved, StateLayout

CHANNELS = 4  # neighbouring ones that a thread convolves
MAX_TOKENS = 8  # of a sequence, all of which are staged at once
MAX_COLUMNS = 32  # of slots that a sequence may start from: a lane of a warp reads each


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv(Part):
    """What a call fixes of the convolution; its inputs and its window have one dtype, its results are rounded to it."""

    width: int = 4  # taps
    weight: DType = DType.BF16
    bias: DType | None = None
    len: int = 3  # inputs of a channel that conv_state holds
    layout: StateLayout = StateLayout.RUNS
    loads: Loads = Loads.VECTOR  # of the inputs
    taps: Loads = Loads.VECTOR  # of weight and bias
    tokens: int = field(default=0, metadata=LATER)  # of a sequence, where a call has several; 0 where it has one without an axis
    windows: Saved = field(default=Saved.NO, metadata=LATER)  # how those after each token lie, kept as [rows, tokens, channels, width - 1]
    rows: Index = field(default=Index.NONE, metadata=LATER)  # type of the rows' numbers in that buffer

    @property
    def saves(self) -> bool:
        """Whether the window after each token is kept."""
        return self.windows is not Saved.NO

    @property
    def saves_any(self) -> bool:
        """Whether those windows have any distances."""
        return self.windows is Saved.ANY

    @property
    def runs(self) -> bool:
        """Whether windows lie as one run."""
        return self.layout is StateLayout.RUNS

    @property
    def any_place(self) -> bool:
        """Whether channels and inputs of a window have any distances."""
        return self.layout is StateLayout.ANY

    @property
    def loose(self) -> bool:
        """Whether the inputs are loaded element by element."""
        return self.loads is Loads.ELEMENT

    @property
    def loose_taps(self) -> bool:
        return self.taps is Loads.ELEMENT

    def faults(self, rolls: bool) -> list[str]:
        """What no variant could serve. rolls: the window's history begins where the accepted tokens of the last call end."""
        return [
            *must(2 <= self.width <= MAX_WIDTH, f"conv_width {self.width} is not 2 … {MAX_WIDTH}"),
            *(self._faults_of_rolling() if rolls else self._faults_of_length()),
            *must(0 <= self.tokens <= MAX_TOKENS, f"{self.tokens} tokens are not 1 … {MAX_TOKENS}"),
            *must(self.tokens > 0 or not self.saves, "windows after each of several tokens, and there are none"),
            *must(self.saves or self.rows is Index.NONE, "rows of windows that are not kept"),
        ]

    def _faults_of_length(self) -> list[str]:
        width = self.width
        return must(
            self.len in (width - 1, width),
            f"conv_state holds {self.len} inputs per channel; of a convolution of width {width} it is {width - 1} or {width}",
        )

    def _faults_of_rolling(self) -> list[str]:
        least = self.rolled_len
        return [
            *must(self.len >= least, f"conv_state holds {self.len} inputs per channel; with accepted tokens at least {least}"),
            *must(
                self.layout is not StateLayout.RUNS or self.len == least,
                f"runs of {self.len} inputs are not {least}: all of a run is rewritten",
            ),
        ]

    @property
    def rolled_len(self) -> int:
        """Inputs that a window holds at least, to which tokens are added of which not all may be accepted."""
        return self.width - 2 + self.tokens
