"""The gated norm at a decode layer's end: its second kernel, behind the one that does the recurrence."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..spec import DType, Index, KernelSpec, Loads, Param, Pdl, must
from . import gated_rms_norm
from .gated_rms_norm import Activation, NormProblem, NormSpec

_NAMES = {"gate": "z", "weight": "norm_weight", "out": "out"}  # of the norm's operands in a layer


@dataclass(frozen=True, kw_only=True)
class LayerGatedNormSpec(NormSpec):
    """gated_rms_norm in place, of what the kernel ahead leaves in `out`. Rows without a slot, which are zero, stay so."""

    family: ClassVar[str] = "layer_gated_norm"
    template: ClassVar[str] = "layer_gated_norm.cu.j2"

    index: Index = Index.NONE

    @property
    def stem(self) -> str:
        return f"layer_gated_{super().stem}"

    def faults(self) -> list[str]:
        return [
            *NormProblem.faults(self),
            *must(self.gate is not None and self.weight is not None, "the norm of a layer has a gate and a weight"),
            *must(self.x == self.out, "the norm of a layer is in place"),
        ]

    def roles(self) -> list[str]:
        return [*_NAMES]

    def operands(self) -> list[str]:
        return [*_NAMES.values(), *(["state_indices"] if self.index is not Index.NONE else [])]

    def early_operands(self) -> list[str]:
        return [name for name in self.operands() if name != "out"] if self.pdl is not Pdl.OFF else []

    def parameters(self) -> list[Param]:
        params = super().parameters()
        if self.index is Index.NONE:
            return params
        slots = [Param.i64("slots"), Param.i64("pad_slot_id")]
        pointer = Param.pointer("state_indices", "int" if self.index is Index.I32 else "i64")
        first = len(self.roles())  # pointers come first
        return [*params[:first], pointer, *slots, *params[first:], Param.u32("state_indices_row")]

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"pooled": self.index is not Index.NONE, "late_weight": False}


@dataclass(frozen=True, kw_only=True)
class LayerGatedNorm:
    """What a layer's call fixes of its norm; nothing where it has none."""

    norm: DType | None = None  # of norm_weight
    norm_gate: DType = DType.BF16  # of z
    norm_size: int = 0  # channels of a group
    norm_grouped: bool = False  # rows have several groups
    norm_first: bool = False
    norm_activation: Activation = Activation.SILU
    norm_loads: Loads = Loads.VECTOR

    def norm_problem(self, out: DType) -> NormProblem:
        """`out`: dtype of what is normalised."""
        return NormProblem(
            size=self.norm_size,
            x=out,
            gate=self.norm_gate,
            weight=self.norm,
            out=out,
            norm_first=self.norm_first,
            activation=self.norm_activation,
            grouped=self.norm_grouped,
            loads=self.norm_loads,
        )

    def norm_faults(self, channels: int, out: DType) -> list[str]:
        if self.norm is None:
            return []
        whole = self.norm_size > 0 and channels % self.norm_size == 0
        return [
            *must(whole, f"groups of {self.norm_size} channels do not make up {channels}"),
            *self.norm_problem(out).faults(),
        ]

    def norm_kernels(self, out: DType, index: Index, threads: int, pdl: Pdl) -> tuple[KernelSpec, ...]:
        """The kernel behind the recurrence's, in blocks of about so many threads; none where there is no norm."""
        if self.norm is None:
            return ()
        problem = self.norm_problem(out)
        chosen = gated_rms_norm.shape(problem, problem.widest, threads, pdl=Pdl.OFF if pdl is Pdl.OFF else Pdl.TRIGGER_LOADED)
        return (LayerGatedNormSpec(**{f.name: getattr(chosen, f.name) for f in fields(NormSpec)}, index=index),)
