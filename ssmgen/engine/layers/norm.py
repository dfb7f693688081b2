"""The gated norm at the end of a decode layer: a second kernel after the recurrence's, and the base of layers with this norm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...spec.kernel import LATER, Index, KernelSpec, Param, Pdl, must
from ...spec.variants import spec_of
from ..norm import LayerNormSpec
from ..norm_kernel import NormKernel, NormProblem, shape
from .problem import Layer

_NAMES = {"gate": "z", "weight": "norm_weight", "out": "out"}  # of the norm's operands in a layer


@dataclass(frozen=True, kw_only=True)
class LayerGatedNormSpec(NormKernel, LayerNormSpec):
    """The gated norm in place, on the previous kernel's `out`. Rows without a slot are zero and stay zero."""

    family: ClassVar[str] = "layer_gated_norm"
    template: ClassVar[str] = "engine/layer_gated_norm.cu.j2"

    index: Index = Index.NONE
    tokens: int = field(default=1, metadata=LATER)  # per sequence; rows count the tokens of all sequences
    accepted: Index = field(default=Index.NONE, metadata=LATER)  # type of num_accepted_tokens, which selects the column of state_indices
    late: bool = field(default=False, metadata=LATER)  # loads everything after the wait: the previous kernel triggers before its own

    @property
    def stem(self) -> str:
        return f"layer_gated_{super().stem}"

    def faults(self) -> list[str]:
        return [
            *NormProblem.faults(self),
            *must(self.gate is not None and self.weight is not None, "gate or weight is none; expected both in a layer's norm"),
            *must(
                self.x == self.out, f"x is {self.x.value} and out is {self.out.value}; expected one dtype, since a layer's norm is in place"
            ),
            *must(not self.partial, f"a layer's norm has groups of {self.size} elements; expected a multiple of 4"),
            *must(self.tokens >= 1, f"tokens is {self.tokens}; expected 1 or more"),
            *must(
                self.accepted is Index.NONE or self.index is not Index.NONE,
                f"accepted is {self.accepted.value} with index=none; expected a type of state_indices for index",
            ),
        ]

    def roles(self) -> list[str]:
        return [*_NAMES]

    def operands(self) -> list[str]:
        pooled = ["state_indices"] if self.index is not Index.NONE else []
        return [*_NAMES.values(), *pooled, *(["num_accepted_tokens"] if self.accepted is not Index.NONE else [])]

    def early_operands(self) -> list[str]:
        return [name for name in self.operands() if name != "out"] if self.pdl is not Pdl.OFF and not self.late else []

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


@dataclass(frozen=True, kw_only=True)
class NormedLayer(Layer):
    """Base of a layer's problem whose norm, if any, is the gated norm."""

    def norm_problem(self) -> NormProblem:
        norm, out = self.norm, self.out
        return NormProblem(
            size=norm.size,
            x=out,
            gate=norm.gate,
            weight=norm.weight,
            out=out,
            norm_first=norm.first,
            activation=norm.activation,
            grouped=norm.grouped,
            loads=norm.loads,
        )

    def norm_faults(self) -> list[str]:
        partial = must(self.norm.size % 4 == 0, f"a layer's norm has groups of {self.norm.size} elements; expected a multiple of 4")
        return [*partial, *self.norm_problem().faults()] if self.norm.weight else []

    def norm_kernels(self, threads: int, pdl: Pdl) -> tuple[KernelSpec, ...]:
        if self.norm.weight is None:
            return ()
        problem, pdl = self.norm_problem(), Pdl.OFF if self.pdl is Pdl.OFF else pdl
        given: dict[str, Any] = {"index": self.index, "tokens": self.conv.tokens or 1, "accepted": self.accepted}
        given |= {"late": self.pdl is Pdl.TRIGGER_FIRST}
        return (spec_of(LayerGatedNormSpec, problem, **given, **shape(problem, problem.widest, threads), pdl=pdl),)
