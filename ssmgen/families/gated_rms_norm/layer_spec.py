"""The gated norm at a decode layer's end: its second kernel, behind the one that does the recurrence."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ...engine.norm import LayerNormSpec
from ...spec import BARE, LATER, DType, Index, KernelSpec, Loads, Param, Part, Pdl, must
from . import spec as gated_rms_norm
from .spec import Activation, NormProblem, NormSpec

_NAMES = {"gate": "z", "weight": "norm_weight", "out": "out"}  # of the norm's operands in a layer


@dataclass(frozen=True, kw_only=True)
class LayerGatedNormSpec(NormSpec, LayerNormSpec):
    """gated_rms_norm in place, of what the kernel ahead leaves in `out`. Rows without a slot, which are zero, stay so."""

    family: ClassVar[str] = "layer_gated_norm"
    template: ClassVar[str] = "gated_rms_norm/layer_gated_norm.cu.j2"

    index: Index = Index.NONE
    tokens: int = field(default=1, metadata=LATER)  # of a sequence: rows are those of all sequences
    accepted: Index = field(default=Index.NONE, metadata=LATER)  # type of num_accepted_tokens, which picks the column of state_indices

    @property
    def stem(self) -> str:
        return f"layer_gated_{super().stem}"

    def faults(self) -> list[str]:
        return [
            *NormProblem.faults(self),
            *must(self.gate is not None and self.weight is not None, "the norm of a layer has a gate and a weight"),
            *must(self.x == self.out, "the norm of a layer is in place"),
            *must(self.tokens >= 1, f"{self.tokens} tokens per sequence"),
            *must(self.accepted is Index.NONE or self.index is not Index.NONE, "num_accepted_tokens needs slot indices"),
        ]

    def roles(self) -> list[str]:
        return [*_NAMES]

    def operands(self) -> list[str]:
        pooled = ["state_indices"] if self.index is not Index.NONE else []
        return [*_NAMES.values(), *pooled, *(["num_accepted_tokens"] if self.accepted is not Index.NONE else [])]

    def early_operands(self) -> list[str]:
        return [name for name in self.operands() if name != "out"] if self.pdl is not Pdl.OFF else []

    def strides(self) -> list[tuple[str, str]]:
        rows = ("sequence", "token") if self.tokens > 1 else ("row",)
        return [(role, axis) for role, given in super().strides() for axis in (rows if given == "row" else (given,))]

    def parameters(self) -> list[Param]:
        params = super().parameters()
        if self.index is Index.NONE:
            return params
        integer = {Index.I32: "int", Index.I64: "i64"}
        pointers, strides = [Param.pointer("state_indices", integer[self.index])], [Param.u32("state_indices_row")]
        if self.accepted is not Index.NONE:
            pointers += [Param.pointer("num_accepted_tokens", integer[self.accepted])]
            strides += [Param.u32("state_indices_column"), Param.u32("num_accepted_tokens_row"), Param.u32("columns")]
        first = len(self.roles())  # pointers come first
        return [*params[:first], *pointers, Param.i64("slots"), Param.i64("pad_slot_id"), *params[first:], *strides]

    def constants(self) -> dict[str, Any]:
        given = {"accepted": self.accepted is not Index.NONE, "late_weight": False}
        return super().constants() | {"pooled": self.index is not Index.NONE, **given}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm(Part):
    """What a layer's call fixes of its norm; nothing where it has none."""

    weight: DType | None = field(default=None, metadata=BARE)  # of norm_weight; none: no norm
    gate: DType = DType.BF16  # of z
    size: int = 0  # channels of a group
    grouped: bool = False  # rows have several groups
    first: bool = False  # z gates what is normed already
    activation: Activation = Activation.SILU
    loads: Loads = Loads.VECTOR

    def problem(self, out: DType) -> NormProblem:
        """`out`: dtype of what is normalised."""
        return NormProblem(
            size=self.size,
            x=out,
            gate=self.gate,
            weight=self.weight,
            out=out,
            norm_first=self.first,
            activation=self.activation,
            grouped=self.grouped,
            loads=self.loads,
        )

    def faults(self, channels: int, out: DType) -> list[str]:
        """What no variant could serve, of rows of so many channels."""
        if self.weight is None:
            return []
        whole = self.size > 0 and channels % self.size == 0
        return [
            *must(whole, f"groups of {self.size} channels do not make up {channels}"),
            *self.problem(out).faults(),
        ]

    def kernels(self, out: DType, threads: int, pdl: Pdl, **more: Any) -> tuple[KernelSpec, ...]:
        """The kernel behind the recurrence's, in blocks of about so many threads; none where there is no norm. more: its further fields."""
        if self.weight is None:
            return ()
        problem = self.problem(out)
        chosen = gated_rms_norm.shape(problem, problem.widest, threads, pdl=Pdl.OFF if pdl is Pdl.OFF else Pdl.TRIGGER_LOADED)
        return (LayerGatedNormSpec(**{f.name: getattr(chosen, f.name) for f in fields(NormSpec)}, **more),)
