"""The memory layout of a short convolution's window, shared by its decode step and by whole layers."""

from __future__ import annotations

from enum import Enum

MAX_WIDTH = 8  # taps


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
