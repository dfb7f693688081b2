"""How a kernel processes the states of Mamba-1 and Mamba-2, for one or several tokens per call.

A row of the engine is one of headdim, d_state long.
Mamba-1 is one head of `dim` rows; its A and dt differ per row ("untied"). Mamba-2 ties A, dt and dt_bias per head.

For several tokens, which only Mamba-2 takes, a block stages some tokens in shared memory and loops over them with its rows in registers. A
state is read once, and written as often as the call requests. The arithmetic per token is the same as in the kernels for a single token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ....spec.kernel import FP8, LATER, Arch, Index, Loads, Narrow, Needs, Param, Update, must
from ...rows import RowSpec
from .operands import OPERANDS
from .problem import SsuProblem

SHARED_BYTES = 48 * 1024


@dataclass(frozen=True, kw_only=True)
class MambaKernel(RowSpec, SsuProblem):
    """A problem, and how one variant computes it. A family's spec adds its name and its templates."""

    table: ClassVar[Any] = OPERANDS

    chunk: int = field(default=8, metadata=LATER)  # tokens staged at a time, where a call has several

    def violations(self, arch: Arch) -> list[str]:
        modern = must(arch >= FP8 or Narrow.E4M3 not in self.narrow, f"arch is {arch}; expected sm_89 or later for fp8 states")
        return RowSpec.violations(self, arch) or staged_violations(self) or modern

    @property
    def needs(self) -> Needs:
        by_byte = any(t.size == 1 for t in self.narrow) and self.state_loads is Loads.ELEMENT
        return replace(super().needs, streaming=self.intermediates, narrow=bool(self.narrow), bytes=by_byte, guarded=self.guarded)

    @property
    def owned_once(self) -> bool:
        steps, whole = self.tile // self.rows_per_step, self.rows % self.tile == 0
        return self.scaled and self.tied and not self.several and whole and 1 < self.ilp < self.lanes == steps * self.ilp

    @property
    def shared_bytes(self) -> int:
        """Staged tokens: B and C, x and z of the tile's rows, dt, its decay and a parent."""
        return 4 * self.chunk * (2 * self.row_room + len(self.row_scalars()) * self.tile + 3) if self.several else 0

    @property
    def stem(self) -> str:
        kind = "ssu_ragged" if self.ragged else "ssu_tokens" if self.several else "ssu"
        return f"{kind}_h{self.nheads}p{self.headdim}n{self.d_state}g{self.ngroups}_{self.state.value}_{self.how()}"

    def row_scalars(self) -> list[str]:
        return row_scalars_of(self)

    def parameters(self) -> list[Param]:
        rows = self.intermediate_indices is not Index.NONE
        counts = {
            "tokens": self.several and not self.ragged,
            "total_tokens": self.ragged,
            "columns": self.accepted is not Index.NONE,
            "dst_columns": self.each and self.ragged,
            "parent_columns": self.parents is not Index.NONE and self.ragged,
            "kept_columns": self.intermediates and self.ragged,
        }
        return [
            *OPERANDS.pointers(self),
            *([] if self.index is Index.NONE else [Param.i64("slots"), Param.i64("pad_slot_id")]),
            *([Param.i64("kept_rows")] if rows else []),
            *OPERANDS.stride_params(self),
            *(Param.u32(name) for name, there in counts.items() if there),
            *([Param.f32("dt_min"), Param.f32("dt_max")] if self.dt_limit else []),
        ]

    def constants(self) -> dict[str, Any]:
        return constants_of(self)


def row_scalars_of(problem: SsuProblem) -> list[str]:
    """Operands with an element per row and token."""
    return ["x", *(["z"] if problem.z else [])]


def constants_of(spec: Any) -> dict[str, Any]:
    """Constants for templates of the recurrence, as a separate operator or in a layer."""
    return {
        "pooled": spec.index is not Index.NONE,
        "split": spec.split,
        "final_state": spec.update is Update.FINAL,
        "each": spec.each,
        "convolved": (),  # operands that the kernel makes itself
        "conv_rolls": False,
        "A_is_log": False,
        "ragged": spec.ragged,
        "accepted": spec.accepted is not Index.NONE,
        "tree": spec.parents is not Index.NONE,
        "rows_by_index": spec.intermediate_indices is not Index.NONE,
        "rounded": spec.rounded,
        "noisy": spec.state.value in spec.rounded,
        "noisy_kept": spec.intermediates and spec.intermediate_states.value in spec.rounded,
        "kept_scaled": spec.kept_scaled,
        "narrow_noise": spec.rounded & {t.value for t in spec.narrow},
        "tail": spec.headdim % spec.tile != 0,
        "vector_state": spec.state_loads is Loads.VECTOR,
        "vector_operands": spec.operand_loads is Loads.VECTOR,
    }


def staged_violations(spec: Any) -> list[str]:
    """Constraints on kernels that stage several tokens; empty for other kernels."""
    if not spec.several:
        return []
    return [
        *must(
            spec.tile == spec.rows_per_step,
            f"tile is {spec.tile}; expected {spec.rows_per_step}, the rows in flight: several tokens keep all rows of a tile in registers",
        ),
        *must(spec.shared_bytes <= SHARED_BYTES, f"a block uses {spec.shared_bytes} bytes of shared memory; expected at most 49152"),
        *must(
            not spec.prefetch or spec.accepted is Index.NONE,
            f"prefetch is {spec.prefetch} with accepted={spec.accepted.value}; expected 0: the column that a call starts from is in memory",
        ),
    ]
