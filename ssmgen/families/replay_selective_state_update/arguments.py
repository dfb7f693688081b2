"""The operands of the replay kernels: their order, strides and which of them are written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from ...spec.kernel import DType, Index, KernelSpec, Loads, Narrow, Param
from .operands import OPERANDS
from .problem import History, ReplayProblem


class Part(Enum):
    """One kernel, or two: one that makes `mix` and keeps the new inputs, and one that goes through the states."""

    FUSED = "fused"
    PRECOMPUTE = "precompute"
    MAIN = "main"


@dataclass(frozen=True, kw_only=True)
class ReplayArguments(KernelSpec, ReplayProblem):
    """A problem, and the choice of one of its kernels."""

    table: ClassVar[Any] = OPERANDS

    part: Part = Part.FUSED

    @property
    def steps(self) -> bool:
        """Whether the history covers one step, in one of two buffers."""
        return self.history is History.STEP

    @property
    def rings(self) -> bool:
        return self.history is History.RING

    @property
    def caches(self) -> bool:
        """Whether the caller says what counts, and which states are written."""
        return self.history is History.CACHE

    @property
    def fused(self) -> bool:
        """Whether one kernel does everything."""
        return self.part is Part.FUSED

    @property
    def makes(self) -> bool:
        """Whether this kernel computes the products between tokens (`mix`)."""
        return self.part is not Part.MAIN

    @property
    def applies(self) -> bool:
        """Whether this kernel goes through the states."""
        return self.part is not Part.PRECOMPUTE

    @property
    def takes_rate(self) -> bool:
        """Whether this kernel takes A."""
        return (self.makes and not self.materialize) or not self.steps

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens is not Index.NONE

    @property
    def loose(self) -> bool:
        """Whether operands are loaded element by element, at any stride."""
        return self.operand_loads is Loads.ELEMENT

    @property
    def out_type(self) -> DType | Narrow:
        return self.state if self.materialize and not self.scaled else self.out

    def written(self) -> list[str]:
        """Operands that the kernel may write."""
        return OPERANDS.written_by(self)

    def parameters(self) -> list[Param]:
        pooled, strides = self.index is not Index.NONE, OPERANDS.stride_params(self)
        wide = [Param.i64("slots"), Param.i64("pad_slot_id")] if pooled else []
        narrow = [*(["state_indices_batch"] if pooled else []), "window", *(["ring"] if self.rings else [])]
        narrow += [] if self.materialize else ["total_tokens" if self.ragged else "tokens"]
        return [
            *OPERANDS.pointers(self), *wide, *(p for p in strides if p.code == "q"), *map(Param.u32, narrow),
            *(p for p in strides if p.code != "q"),
        ]  # fmt: skip
