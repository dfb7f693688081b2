"""The memory layout of a short convolution's window, shared by its decode step and by whole layers."""

from __future__ import annotations

from enum import Enum

from ..spec.kernel import Loads, must

MAX_WIDTH = 8  # taps
MAX_REACH = 17  # inputs that a window spans, of taps that are apart
GATES = ("input_gate", "output_gate")
RESIDUALS = ("residual", "outer_residual")  # added to the output, in this order
BESIDE = GATES + RESIDUALS


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


class Convolution:
    """Part of the problem of a convolution, over prompts or in decoding: taps that may be apart, gates, and residuals."""

    __slots__ = ()
    width: int
    taps: Loads
    input_gate: bool
    output_gate: bool
    residual: bool
    outer_residual: bool
    dilation: int

    @property
    def reach(self) -> int:
        """Inputs that a window spans."""
        return reach_of(self.width, self.dilation)

    @property
    def gates(self) -> tuple[str, ...]:
        """The gates that are given."""
        return tuple([name for name in GATES if getattr(self, name)])

    @property
    def beside(self) -> tuple[str, ...]:
        """The gates and residuals that are given."""
        return self.gates + self.residuals

    @property
    def residuals(self) -> tuple[str, ...]:
        """The residuals that are given."""
        return tuple([name for name in RESIDUALS if getattr(self, name)])

    @property
    def loose_taps(self) -> bool:
        return self.taps is Loads.ELEMENT

    def reach_faults(self) -> list[str]:
        """Constraints on the window and the residuals that no variant can meet."""
        return [
            *must(
                self.dilation >= 1 and self.reach <= MAX_REACH,
                f"dilation is {self.dilation} with width {self.width}; expected 1 or more, and a window of at most {MAX_REACH} inputs",
            ),
            *must(self.residual or not self.outer_residual, "outer_residual is yes without residual; expected both, or residual alone"),
        ]


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
