"""What gdn_layer and kda_layer of several tokens per sequence share, for speculative decoding: their short convolution, delta rule and
gated norm.

Two kernels: that of linear_attention of several tokens, which convolves q, k and v of all tokens itself, straight into the shared memory
that it stages tokens in; and the gated norm of all rows behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.rows import Rule
from ...engine.short_conv import ShortConvTokens, pointers, with_registers
from ...spec import SM90, Arch, DType, Index, KernelSpec, Loads, Param, PoolMode, must
from ..causal_conv1d_update.spec import Saved, StateLayout
from ..gated_rms_norm.layer_spec import LayerGatedNorm
from ..gated_rms_norm.spec import FEW
from ..linear_attention.problem import Gate, LinearAttentionProblem, Tokens, Update
from ..linear_attention.spec import LinearAttentionSpec
from .spec import CONVOLVED, DeltaLayerProblem, DeltaRule


@dataclass(frozen=True, kw_only=True)
class DeltaLayerTokensProblem(DeltaRule, ShortConvTokens, LayerGatedNorm, LinearAttentionProblem):
    """What a call fixes."""

    intermediate_indices: Index = Index.NONE  # type of the rows' numbers in intermediate_states

    def faults(self) -> list[str]:
        return [
            *self.rule_faults(),
            *must(self.tokens is Tokens.MANY, "a layer of several tokens takes as many of every sequence, and no packed ones"),
            *self.form_faults(),
            *must(self.intermediates or self.intermediate_indices is Index.NONE, "rows of states that are not kept"),
        ]


@dataclass(frozen=True, kw_only=True)
class DeltaLayerTokensSpec(LinearAttentionSpec, DeltaLayerTokensProblem):
    """A problem, and how one variant computes it."""

    template: ClassVar[str] = "delta_layer/several_tokens.cu.j2"
    call_names: ClassVar[Mapping[str, str]]  # of operands that the call names otherwise than the recurrence

    norm_threads: int = 32  # of a block of the norm, about

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        more = {"tokens": self.conv_tokens, "accepted": self.accepted}
        return (self, *self.norm_kernels(self.out, self.index, self.norm_threads, self.pdl, **more))

    def violations(self, arch: Arch) -> list[str]:
        if found := LinearAttentionSpec.violations(self, arch) or self.conv_violations(self.tile):
            return found
        return [
            *must(self.chunk == self.conv_tokens, f"all {self.conv_tokens} tokens are staged at once, not {self.chunk}"),
            *(problem for kernel in self.kernels[1:] for problem in kernel.violations(arch)),
        ]

    @property
    def shared_bytes(self) -> int:
        """Staged tokens, perhaps with a slot each, and who is the last block of a group."""
        slots = 8 * self.chunk if self.update is Update.EACH else 0
        return LinearAttentionSpec.shared_bytes.fget(self) + slots + 16

    @property
    def stem(self) -> str:
        shape = f"t{self.conv_tokens}_h{self.nheads}v{self.dim_v}k{self.dim_k}g{self.key_heads}_{self.state.value}"
        return f"{self.family.removesuffix('_tokens')}_{shape}_{self.update.value}_{self.how()}"

    def _roles(self) -> list[str]:
        """Tensor arguments in order, as the template names them."""
        there = {
            **{name: getattr(self, name) is not None for name in ("g", "gk", "beta", "A_log", "dt_bias")},
            "out": True,
            "state_indices": self.index is not Index.NONE,
            "dst_state_indices": self.update is Update.EACH,
            "num_accepted_tokens": self.accepted is not Index.NONE,
            "intermediate_states": self.intermediates,
            "intermediate_state_indices": self.rows_index is not Index.NONE,
            "arrivals": self.conv_moves,
        }
        return ["state", *self.conv_operands(), *(name for name, given in there.items() if given)]

    def operands(self) -> list[str]:
        """The same as the call names them."""
        return [self.call_names.get(role, role) for role in self._roles()]

    def strides(self) -> list[tuple[str, str, str]]:
        """(role, axis, width) of every stride the kernel takes, in elements. Those between slots and between kept states are 64-bit."""
        element = ["n"] if self.operand_loads is Loads.ELEMENT else []
        axes = self.conv_strides() | {
            "state": ["slot"],
            **dict.fromkeys(("g", "beta"), ["batch", "token", "head"]),
            "gk": ["batch", "token", "head", *element],
            "A_log": ["head"],
            "dt_bias": ["head", *(element if self.gk else [])],
            "out": ["batch", "token", "head", "row"],
            "state_indices": ["batch", *(["column"] if self.conv_rolls else [])],
            "dst_state_indices": ["batch", "token"],
            **dict.fromkeys(("num_accepted_tokens", "intermediate_state_indices"), ["batch"]),
            "intermediate_states": ["row", "token"],
        }
        wide = {("intermediate_states", "row"), ("intermediate_states", "token")}
        return [(role, axis, "i64" if axis == "slot" or (role, axis) in wide else "u32") for role in self._roles() for axis in axes[role]]

    def parameters(self) -> list[Param]:
        element = {f.name: getattr(self, f.name).value for f in fields(self) if isinstance(getattr(self, f.name), DType)}
        integer = {Index.I32: "int", Index.I64: "i64", Index.NONE: ""}
        element |= self.conv_elements() | dict.fromkeys(("state_indices", "dst_state_indices"), integer[self.index])
        element |= {"num_accepted_tokens": integer[self.accepted], "intermediate_state_indices": integer[self.rows_index]}
        element["intermediate_states"] = self.state.value
        written = ("state", "conv_state", "out", "arrivals", "intermediate_states", "intermediate_conv_window")
        strides = [(Param.i64 if width == "i64" else Param.u32)(f"{role}_{axis}") for role, axis, width in self.strides()]
        strides.sort(key=lambda p: p.code != "q")  # 8-byte arguments first: no padding anywhere in the buffer
        counts = {
            "slots": self.index is not Index.NONE,
            "pad_slot_id": self.index is not Index.NONE,
            "kept_rows": self.intermediate_indices is not Index.NONE,
            "window_rows": self.conv_rows is not Index.NONE,
        }
        return [
            *pointers(self._roles(), element, written),
            *(Param.i64(name) for name, there in counts.items() if there),
            *strides,
            *([Param.u32("columns")] if self.conv_rolls else []),
            Param.f32("scale"),
            *([Param.f32("lower_bound")] if self.gate is Gate.BOUNDED else []),
        ]

    def constants(self) -> dict[str, Any]:
        return {
            **LinearAttentionSpec.constants(self),
            **self.conv_constants(),
            "convolved": CONVOLVED,
            # k is written with as it is, and q read with, unless the decay is multiplied in
            "in_place": ("write",) if self.gk else ("query", "write"),
            "rows_by_index": self.intermediate_indices is not Index.NONE,
        }


def problems(
    kind: type[DeltaLayerTokensProblem], one: DeltaLayerProblem, tokens: int, intermediates: bool = False, update_state: bool = True
) -> list[DeltaLayerTokensProblem]:
    """What a call of so many tokens asks for, where one of a single token asks for `one`: for the states that a call leaves behind, and,
    with slots, for one per token, whose windows roll; or with intermediates, and windows beside them. kind: the layer's."""
    given = {f.name: getattr(one, f.name) for f in fields(one)} | {"tokens": Tokens.MANY, "conv_tokens": tokens}
    kept = {"intermediates": True, "conv_windows": Saved.RUNS} if intermediates else {}
    found = [kind(**given | kept | {"update": Update.FINAL if update_state else Update.NONE})]
    if one.index is not Index.NONE and update_state and not intermediates and one.conv_len == one.conv_width - 1:
        rolls = {"accepted": Index.I32, "update": Update.EACH, "pool": PoolMode.SPLIT, "conv_len": one.conv_width - 2 + tokens}
        found.append(kind(**given | rolls))
    return found


def _spec(kind: type[DeltaLayerTokensSpec], problem: DeltaLayerTokensProblem, **how: Any) -> DeltaLayerTokensSpec:
    return kind(**{f.name: getattr(problem, f.name) for f in fields(DeltaLayerTokensProblem)}, chunk=problem.conv_tokens, **how)


def space(kind: type[DeltaLayerTokensSpec], problem: DeltaLayerTokensProblem, arch: Arch) -> Iterator[DeltaLayerTokensSpec]:
    """Every legal variant of a problem within the axes worth trying; kind: the layer's."""
    specs = (_spec(kind, problem, **how) for how in row_engine.axes())
    return (spec for spec in specs if not spec.violations(arch))


# Measured on an H200 with every token's state kept; by bytes of an element. A thread for each four channels of a block, at least: all of
# them convolve at once.
RULES = {
    2: [Rule("latency", 48, tile_kib=8), Rule("bandwidth", float("inf"), tile_kib=16, prefetch=132)],
    4: [Rule("latency", 48, tile_kib=16), Rule("bandwidth", float("inf"), tile_kib=16, ilp=2, prefetch=132)],
}
INTERLEAVED = [Rule("few", 8, tile_kib=16), Rule("all", float("inf"), tile_kib=32)]  # of which a thread holds more


def candidates(
    kind: type[DeltaLayerTokensSpec], problem: DeltaLayerTokensProblem, batch: int, arch: Arch, pdl: bool
) -> Iterator[tuple[str, DeltaLayerTokensSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    norm = {"norm_threads": 32 if batch * problem.conv_tokens * problem.norm_groups <= FEW else 128}
    rules = INTERLEAVED if problem.interleaved else RULES[problem.state.size]
    for rule, how, reason in row_engine.choices(problem, rules, batch, arch, pdl):
        if how is not None and problem.accepted is not Index.NONE:
            how["prefetch"] = 0  # it does not know the column that is started from
        yield rule, None if how is None else _spec(kind, problem, **_with_registers(problem, how, arch), **norm), reason


def _with_registers(problem: DeltaLayerTokensProblem, how: dict[str, Any], arch: Arch) -> dict[str, Any]:
    """With 128 registers to a thread, or, where rows are interleaved or channels gathered, as many as it takes; on sm_90 ptxas chooses.

    Elsewhere its choice may spill a few bytes.
    """
    gathers = problem.conv_layout is StateLayout.ANY or Loads.ELEMENT in (problem.conv_loads, problem.conv_taps, problem.operand_loads)
    if arch.number == SM90.number or problem.interleaved or gathers:
        return with_registers(how, arch)
    return how | {"min_blocks": max(1, 512 // how["threads"])}
