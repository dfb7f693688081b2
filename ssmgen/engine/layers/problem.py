"""A decode layer's problem and kernels: the parts around any recurrence, for one or several tokens per sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ...spec.kernel import SM90, Arch, DType, Index, KernelSpec, Loads, Param, Pdl, PoolMode, Update, changed, must
from ...spec.operands import Table
from ..norm import LayerNorm
from ..short_conv import CHANNELS, ShortConv
from ..window import Saved, StateLayout

L = TypeVar("L", bound="Layer")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Base of a layer's problem, combined with its recurrence's: a short convolution before the recurrence, and a gated norm after it.

    The recurrence's problem has `several`, `update`, `accepted`, `intermediates`, `index` and `out`.
    """

    conv: ShortConv = field(default=ShortConv())
    norm: LayerNorm = field(default=LayerNorm())

    if TYPE_CHECKING:  # fields of the recurrence
        several: bool
        update: Update
        accepted: Index
        intermediates: bool
        intermediate_indices: Index
        index: Index
        out: DType
        pdl: Pdl

    @property
    def conv_dtype(self) -> DType:
        """Type of the convolution's inputs, its window and its results."""
        raise NotImplementedError

    @property
    def conv_input(self) -> str:
        """The operand that is convolved."""
        raise NotImplementedError

    @property
    def shared_channels(self) -> int:
        """Channels of a block that other blocks of its group convolve as well."""
        raise NotImplementedError

    @property
    def norm_groups(self) -> int:
        """Groups of a row that are normalised separately; 0 without a norm."""
        raise NotImplementedError

    @property
    def conv_rolls(self) -> bool:
        """Whether the window's history begins after the accepted tokens of the last call, and new tokens are appended to it."""
        return self.accepted is not Index.NONE

    @property
    def conv_moves(self) -> bool:
        """Whether the window is written."""
        return self.update is not Update.NONE

    @property
    def rows_index(self) -> Index:
        """Type of intermediate_state_indices, for states, windows or both."""
        return self.conv.rows if self.intermediate_indices is Index.NONE else self.intermediate_indices

    def layer_faults(self, heads: int, rows: int) -> list[str]:
        """Constraints that no variant can meet, for a recurrence with `heads` heads of `rows` rows."""
        shared, kept = self.shared_channels, self.conv.saves and self.intermediates
        return [
            *self.conv.faults(self.conv_rolls),
            *must(
                shared % CHANNELS == 0 and rows % CHANNELS == 0,
                f"a group has {shared} channels and a head {rows}; expected multiples of {CHANNELS}",
            ),
            *self.norm.faults(heads * rows),
            *self.norm_faults(),
            *must(
                self.several == (self.conv.tokens > 0),
                f"conv_tokens is {self.conv.tokens} in a call of "
                f"{'several tokens; expected 1 or more' if self.several else 'one token; expected 0'}",
            ),
            *must(
                self.conv_rolls == (self.update is Update.EACH),
                f"accepted is {self.accepted.value} with update={self.update.value}; expected accepted if and only if update is each",
            ),
            *must(
                not kept or self.conv.rows == self.intermediate_indices,
                f"conv_rows is {self.conv.rows.value} and intermediate_indices is {self.intermediate_indices.value}; "
                "expected one type for both",
            ),
        ]

    def conv_violations(self, tile: int) -> list[str]:
        """tile: rows of a block."""
        return must(tile % CHANNELS == 0, f"tile is {tile}; expected a multiple of the {CHANNELS} channels that a thread convolves")

    def norm_pdl_violations(self, pdl: Pdl, separate: bool) -> list[str]:
        """pdl: of the norm's kernel, if it has one."""
        return [
            *must(pdl is not Pdl.OFF, "norm_pdl is off; expected a kind of wait, or pdl=off for both kernels"),
            *must(separate or pdl is Pdl.TRIGGER_LOADED, f"norm_pdl is {pdl.value} without a separate norm; expected trigger_loaded"),
        ]

    def layer_parameters(self, operands: Table) -> list[Param]:
        """Kernel arguments, without the last ones, which the recurrence adds."""
        pooled = self.index is not Index.NONE
        counts = {
            "slots": pooled,
            "pad_slot_id": pooled,
            "kept_rows": self.intermediate_indices is not Index.NONE,
            "window_rows": self.conv.rows is not Index.NONE,
        }
        return [
            *operands.pointers(self),
            *(Param.i64(name) for name, there in counts.items() if there),
            *operands.stride_params(self),
            *([Param.u32("columns")] if self.conv_rolls else []),
        ]

    def conv_constants(self) -> dict[str, Any]:
        return {
            "conv_input": self.conv_input,
            "conv_dtype": self.conv_dtype.value,
            "runs": self.conv.runs,
            "by_channels": self.conv.layout is StateLayout.CHANNELS,
            "vector_inputs": self.conv.loads is Loads.VECTOR,
            "vector_taps": self.conv.taps is Loads.VECTOR,
            "conv_several": self.several,
            "conv_rolls": self.conv_rolls,
            "conv_moves": self.conv_moves,
            "conv_saves": self.conv.saves,
            "conv_rows": self.conv.rows is not Index.NONE,
            "saved_runs": self.conv.windows is Saved.RUNS,
            "conv_slot": "window_slot" if self.conv_rolls else "slot",  # of the window
        }

    def norm_kernels(self, threads: int, pdl: Pdl) -> tuple[KernelSpec, ...]:
        """The norm's kernel, launched after the recurrence's, with about `threads` threads per block; empty without a norm. pdl: its own,
        unless this kernel's is off."""
        raise NotImplementedError

    def norm_faults(self) -> list[str]:
        """Constraints of the norm that no kernel can meet; empty without a norm."""
        raise NotImplementedError

    def of_tokens(self: L, tokens: int, intermediates: bool = False, update_state: bool = True) -> list[L]:
        """The problems of calls with `tokens` tokens, for models whose calls with one token have this problem. One problem keeps the final
        state. With slots, a second one writes a state per token, and its windows roll. With intermediates, states and windows after each
        token are kept."""
        many = changed(self, conv_tokens=tokens, **self.fields_of_tokens(intermediates))
        kept = {"conv_windows": Saved.RUNS} if intermediates else {}
        found = [changed(many, update=Update.FINAL if update_state else Update.NONE, **kept)]
        if self.index is not Index.NONE and update_state and not intermediates and self.conv.len == self.conv.width - 1:
            rolls = {"accepted": Index.I32, "update": Update.EACH, "pool": PoolMode.SPLIT, "conv_len": many.conv.rolled_len}
            found.append(changed(many, **rolls))
        return found

    def fields_of_tokens(self, intermediates: bool) -> dict[str, Any]:
        """Fields of the recurrence's problem for several tokens; with `intermediates`, the state after each token is kept."""
        raise NotImplementedError


def with_registers(how: dict[str, Any], arch: Arch) -> dict[str, Any]:
    """The choices of a variant, with permission for all the registers that it needs. On sm_90 ptxas chooses, as measured there.

    On other architectures ptxas would spill a few bytes, to stay below 80, 96 or 128 registers.
    """
    return how if arch.number == SM90.number else how | {"min_blocks": 1}
