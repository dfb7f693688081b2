"""The memory layout of a short convolution's window, shared by its decode step and by whole layers."""

from __future__ import annotations

from enum import Enum

from ..spec.kernel import Loads

MAX_WIDTH = 8  # taps
MAX_REACH = 17  # inputs that a window spans, of taps that are apart


def reach_of(width: int, dilation: int) -> int:
    """Number of inputs that a window spans: from its oldest tap to the token itself."""
    return (width - 1) * dilation + 1


def history_in_words(dilation: int) -> str:
    """The number of inputs before a token that its window has, for errors."""
    return "width - 1" if dilation == 1 else "(width - 1) dilation"


class StateLayout(Enum):
    """RUNS: a channel's inputs are contiguous, and so are a lane's channels. CHANNELS: channels are contiguous. ANY: neither, or not
    aligned."""

    RUNS = "runs"
    CHANNELS = "channels"
    ANY = "any"


class Saved(Enum):
    """Whether the window after each token is saved: as runs of a lane's channels, or element by element."""

    NO = "no"
    RUNS = "runs"
    ANY = "any"


class Windowed:
    """Part of a problem with a window per channel: how kernels load it, the inputs and the taps."""

    __slots__ = ()
    layout: StateLayout
    loads: Loads  # of x and out
    taps: Loads

    @property
    def runs(self) -> bool:
        """Whether a window is one contiguous run."""
        return self.layout is StateLayout.RUNS

    @property
    def any_place(self) -> bool:
        """Whether channels and inputs of a window have arbitrary strides."""
        return self.layout is StateLayout.ANY

    @property
    def loose(self) -> bool:
        """Whether x and out are loaded and stored element by element."""
        return self.loads is Loads.ELEMENT

    @property
    def loose_taps(self) -> bool:
        return self.taps is Loads.ELEMENT
