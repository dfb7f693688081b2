"""The short convolution that a decode layer's kernel does itself, ahead of its recurrence.

A block convolves the channels that its rows need: those of its group of heads, which other blocks need too, and its own. The window of a
channel that several blocks read is written by the block of them that comes last, which `arrivals` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..spec import SM90, Arch, DType, Index, Loads, Param, Update, must
from .window import MAX_WIDTH, Saved, StateLayout

CHANNELS = 4  # neighbouring ones that a thread convolves
MAX_TOKENS = 8  # of a sequence, all of which are staged at once
MAX_COLUMNS = 32  # of slots that a sequence may start from: a lane of a warp reads each


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """What a call fixes of the convolution; its inputs and its window have one dtype, its results are rounded to it."""

    conv_width: int = 4  # taps
    conv_weight: DType = DType.BF16
    conv_bias: DType | None = None
    conv_len: int = 3  # inputs of a channel that conv_state holds
    conv_layout: StateLayout = StateLayout.RUNS
    conv_loads: Loads = Loads.VECTOR  # of the inputs
    conv_taps: Loads = Loads.VECTOR  # of weight and bias

    @property
    def conv_dtype(self) -> DType:
        raise NotImplementedError

    @property
    def conv_input(self) -> str:
        """The operand that is convolved."""
        raise NotImplementedError

    @property
    def shared_channels(self) -> int:
        """Channels of a block that others of its group convolve as well."""
        raise NotImplementedError

    def conv_faults(self, rows: int) -> list[str]:
        """What no variant could serve, of a recurrence with so many rows per head."""
        width = self.conv_width
        return [
            *must(2 <= width <= MAX_WIDTH, f"conv_width {width} is not 2 … {MAX_WIDTH}"),
            *self.length_faults(),
            *must(
                self.shared_channels % CHANNELS == 0 and rows % CHANNELS == 0,
                f"{self.shared_channels} channels of a group and {rows} of a head are not multiples of {CHANNELS}",
            ),
        ]

    def length_faults(self) -> list[str]:
        """Of windows that cannot be."""
        width = self.conv_width
        return must(
            self.conv_len in (width - 1, width),
            f"conv_state holds {self.conv_len} inputs per channel; of a convolution of width {width} it is {width - 1} or {width}",
        )

    def conv_violations(self, tile: int) -> list[str]:
        """tile: rows of a block."""
        return must(tile % CHANNELS == 0, f"tile {tile} is not a multiple of the {CHANNELS} channels that a thread convolves")

    def conv_operands(self) -> list[str]:
        return ["conv_state", self.conv_input, "conv_weight", *(["conv_bias"] if self.conv_bias else [])]

    def conv_strides(self) -> dict[str, list[str]]:
        """Axes of the strides that the kernel takes, by operand."""
        layout = {StateLayout.RUNS: [], StateLayout.CHANNELS: ["tap"], StateLayout.ANY: ["dim", "tap"]}[self.conv_layout]
        taps = self.conv_taps is Loads.ELEMENT
        return {
            "conv_state": ["slot", *layout],
            self.conv_input: ["batch", *(["dim"] if self.conv_loads is Loads.ELEMENT else [])],
            "conv_weight": ["dim", "tap"] if taps else [],
            "conv_bias": ["dim"] if taps else [],
            "arrivals": ["slot"],
        }

    def conv_elements(self) -> dict[str, str]:
        """Element types of operands, as the kernel names them."""
        same = dict.fromkeys(("conv_state", self.conv_input), self.conv_dtype.value)
        return same | {"conv_weight": self.conv_weight.value, "conv_bias": self.conv_bias and self.conv_bias.value, "arrivals": "int"}

    def conv_constants(self) -> dict[str, Any]:
        return {
            "conv_input": self.conv_input,
            "conv_dtype": self.conv_dtype.value,
            "runs": self.conv_layout is StateLayout.RUNS,
            "by_channels": self.conv_layout is StateLayout.CHANNELS,
            "vector_inputs": self.conv_loads is Loads.VECTOR,
            "vector_taps": self.conv_taps is Loads.VECTOR,
            "conv_several": False,  # tokens
            "conv_rolls": False,  # the window, by the tokens that were accepted
            "conv_slot": "slot",  # of the window
        }


@dataclass(frozen=True, kw_only=True)
class ShortConvTokens(ShortConv):
    """The same of a call with several tokens per sequence, or with what belongs to such calls.

    The recurrence's problem, which a layer inherits too, has `update`, `accepted`, `intermediates` and `intermediate_indices`.
    """

    conv_tokens: int  # of a sequence
    conv_windows: Saved = Saved.NO  # how the windows after each token lie, which are kept in a buffer [rows, tokens, channels, width - 1]
    conv_rows: Index = Index.NONE  # type of the rows' numbers in that buffer

    @property
    def conv_rolls(self) -> bool:
        """Whether the window's history begins where the accepted tokens of the last call end, and tokens are put behind it."""
        return self.accepted is not Index.NONE

    @property
    def conv_moves(self) -> bool:
        """Whether the window is written."""
        return self.update is not Update.NONE

    @property
    def rows_index(self) -> Index:
        """Type of intermediate_state_indices, of states, windows or both."""
        return self.conv_rows if self.intermediate_indices is Index.NONE else self.intermediate_indices

    def form_faults(self) -> list[str]:
        """Of what becomes of states and windows together."""
        both = self.conv_windows is not Saved.NO and self.intermediates
        return [
            *must(
                self.conv_rolls == (self.update is Update.EACH),
                "accepted tokens pick where a layer starts from if and only if states go to slots of their own",
            ),
            *must(not both or self.conv_rows == self.intermediate_indices, "windows and states are kept in rows of the same numbers"),
        ]

    def conv_faults(self, rows: int) -> list[str]:
        saves = self.conv_windows is not Saved.NO
        return [
            *super().conv_faults(rows),
            *must(1 <= self.conv_tokens <= MAX_TOKENS, f"{self.conv_tokens} tokens are not 1 … {MAX_TOKENS}"),
            *must(saves or self.conv_rows is Index.NONE, "rows of windows that are not kept"),
        ]

    def length_faults(self) -> list[str]:
        if not self.conv_rolls:
            return super().length_faults()
        least = self.conv_width - 2 + self.conv_tokens
        return [
            *must(self.conv_len >= least, f"conv_state holds {self.conv_len} inputs per channel; with accepted tokens at least {least}"),
            *must(
                self.conv_layout is not StateLayout.RUNS or self.conv_len == least,
                f"runs of {self.conv_len} inputs are not {least}: all of a run is rewritten",
            ),
        ]

    def conv_operands(self) -> list[str]:
        return [*super().conv_operands(), *([] if self.conv_windows is Saved.NO else ["intermediate_conv_window"])]

    def conv_strides(self) -> dict[str, list[str]]:
        axes = super().conv_strides()
        batch, *rest = axes[self.conv_input]
        windows = ["slot", "token", *(["dim", "tap"] if self.conv_windows is Saved.ANY else [])]
        return axes | {self.conv_input: [batch, "token", *rest], "intermediate_conv_window": windows}

    def conv_elements(self) -> dict[str, str]:
        return super().conv_elements() | {"intermediate_conv_window": self.conv_dtype.value}

    def conv_constants(self) -> dict[str, Any]:
        return super().conv_constants() | {
            "conv_several": True,
            "conv_rolls": self.conv_rolls,
            "conv_moves": self.conv_moves,
            "conv_saves": self.conv_windows is not Saved.NO,
            "conv_rows": self.conv_rows is not Index.NONE,
            "saved_runs": self.conv_windows is Saved.RUNS,
            "conv_slot": "window_slot" if self.conv_rolls else "slot",
        }


def pointers(names: list[str], element: dict[str, Any], written: tuple[str, ...]) -> list[Param]:
    """Of operands, by their element types; const but for those that are written."""
    return [Param.pointer(name, element[name], const=name not in written) for name in names]


def with_registers(how: dict[str, Any], arch: Arch) -> dict[str, Any]:
    """How a variant walks its rows, with all the registers that it needs; on sm_90 ptxas chooses, as measured there.

    Elsewhere that spills a few bytes, to stay below 80, 96 or 128 registers.
    """
    return how if arch.number == SM90.number else how | {"min_blocks": 1}
