"""mamba2_layer of several tokens per sequence, for speculative decoding: their short convolution, state updates and gated norm.

Two kernels: that of selective_state_update of several tokens, which convolves x, B and C of all tokens itself, straight into the shared
memory that it stages tokens in; and the gated norm of all rows behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.rows import RowSpec, Rule
from ...engine.short_conv import ShortConvTokens, pointers
from ...spec import SM90, Arch, DType, Index, KernelSpec, Loads, Needs, Param, PoolMode, must
from ..causal_conv1d_update.spec import Saved
from ..gated_rms_norm.layer_spec import LayerGatedNorm
from ..gated_rms_norm.spec import FEW
from ..linear_attention.problem import Update
from ..selective_state_update.tokens_spec import SHARED_BYTES, SsuTokensProblem, SsuTokensSpec
from . import spec as mamba2_layer

OPERATOR = "mamba2_layer_tokens"


@dataclass(frozen=True, kw_only=True)
class Mamba2LayerTokensProblem(ShortConvTokens, LayerGatedNorm, SsuTokensProblem):
    """What a call fixes. x, B and C are channels of xBC, whose dtype is x's. `z` is of a gate without a norm."""

    A_is_log: bool = False  # A is the logarithm of its absolute value

    conv_dtype = mamba2_layer.Mamba2LayerProblem.conv_dtype
    conv_input = mamba2_layer.Mamba2LayerProblem.conv_input
    norm_groups = mamba2_layer.Mamba2LayerProblem.norm_groups
    shared_channels = mamba2_layer.Mamba2LayerProblem.shared_channels

    def faults(self) -> list[str]:
        return [
            *SsuTokensProblem.faults(self),
            *self.conv_faults(self.headdim),
            *self.norm_faults(self.nheads * self.headdim, self.out),
            *must(self.norm is None or self.z is None, "z gates by itself or in the norm"),
            *must(self.x == self.B == self.C, "x, B and C are of one dtype: they are one tensor"),
            *must(not self.ragged and self.parents is Index.NONE, "a layer takes no packed sequences and no draft trees"),
            *self.form_faults(),
        ]


@dataclass(frozen=True, kw_only=True)
class Mamba2LayerTokensSpec(RowSpec, Mamba2LayerTokensProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "mamba2_layer/several_tokens.cu.j2"

    norm_threads: int = 32  # of a block of the norm, about

    @property
    def chunk(self) -> int:
        """Tokens that are staged at a time: all."""
        return self.conv_tokens

    @property
    def needs(self) -> Needs:
        return replace(super().needs, streaming=self.intermediates)

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        more = {"tokens": self.conv_tokens, "accepted": self.accepted}
        return (self, *self.norm_kernels(self.out, self.index, self.norm_threads, self.pdl, **more))

    def violations(self, arch: Arch) -> list[str]:
        if found := RowSpec.violations(self, arch) or self.conv_violations(self.tile):
            return found
        return [
            *must(self.tile == self.rows_per_step, "several tokens need all rows of a tile in flight at once"),
            *must(self.shared_bytes <= SHARED_BYTES, f"{self.shared_bytes} bytes of shared memory exceed 48 KiB"),
            *must(not self.prefetch or self.accepted is Index.NONE, "the bulk L2 prefetch does not know the column that is started from"),
            *(problem for kernel in self.kernels[1:] for problem in kernel.violations(arch)),
        ]

    @property
    def shared_bytes(self) -> int:
        """Staged tokens: B and C, x and z of the tile's rows, dt, its decay and perhaps a slot; and who is the last block of a group."""
        words = 2 * self.d_state + len(self.row_scalars()) * self.tile + (4 if self.update is Update.EACH else 2)
        return 4 * self.chunk * words + 16

    @property
    def stem(self) -> str:
        shape = f"t{self.conv_tokens}_h{self.nheads}p{self.headdim}n{self.d_state}g{self.ngroups}"
        return f"mamba2_layer_{shape}_{self.state.value}_{self.update.value}_{self.how()}"

    row_scalars = SsuTokensSpec.row_scalars

    def operands(self) -> list[str]:
        """Tensor arguments in order."""
        there = {
            "D": self.D, "z": self.z, "dt_bias": self.dt_bias, "out": True,
            "state_indices": self.index is not Index.NONE,
            "dst_state_indices": self.update is Update.EACH,
            "num_accepted_tokens": self.accepted is not Index.NONE,
            "intermediate_states": self.intermediates,
            "intermediate_state_indices": self.rows_index is not Index.NONE,
            "rand_seed": self.philox_rounds,
            "arrivals": self.conv_moves,
        }  # fmt: skip
        return ["state", *self.conv_operands(), "dt", "A", *(name for name, given in there.items() if given)]

    def strides(self) -> list[tuple[str, str, str]]:
        """(operand, axis, width) of every stride the kernel takes, in elements. Those between slots and between kept states are 64-bit."""
        axes = self.conv_strides() | {
            "state": ["slot"],
            "dt": ["batch", "token", "head"],
            "A": ["head"],
            "D": ["head", "row"],
            **dict.fromkeys(("z", "out"), ["batch", "token", "head", "row"]),
            "dt_bias": ["head"],
            "state_indices": ["batch", *(["column"] if self.conv_rolls else [])],
            "dst_state_indices": ["batch", "token"],
            **dict.fromkeys(("num_accepted_tokens", "intermediate_state_indices"), ["batch"]),
            "intermediate_states": ["row", "token"],
            "rand_seed": ["slot"],
        }
        wide = {("intermediate_states", "row"), ("intermediate_states", "token")}
        return [(op, axis, "i64" if axis == "slot" or (op, axis) in wide else "u32") for op in self.operands() for axis in axes[op]]

    def parameters(self) -> list[Param]:
        element = {f.name: getattr(self, f.name).value for f in fields(self) if isinstance(getattr(self, f.name), DType)}
        integer = {Index.I32: "int", Index.I64: "i64", Index.NONE: ""}
        element |= self.conv_elements() | dict.fromkeys(("state_indices", "dst_state_indices"), integer[self.index])
        element |= {"num_accepted_tokens": integer[self.accepted], "rand_seed": "i64"}
        element |= {"intermediate_state_indices": integer[self.rows_index]}
        written = ("state", "conv_state", "out", "arrivals", "intermediate_states", "intermediate_conv_window")
        strides = [(Param.i64 if width == "i64" else Param.u32)(f"{op}_{axis}") for op, axis, width in self.strides()]
        strides.sort(key=lambda p: p.code != "q")  # 8-byte arguments first: no padding anywhere in the buffer
        counts = {
            "slots": self.index is not Index.NONE,
            "pad_slot_id": self.index is not Index.NONE,
            "kept_rows": self.intermediate_indices is not Index.NONE,
            "window_rows": self.conv_rows is not Index.NONE,
        }
        return [
            *pointers(self.operands(), element, written),
            *(Param.i64(name) for name, there in counts.items() if there),
            *strides,
            *([Param.u32("columns")] if self.conv_rolls else []),
            *([Param.f32("dt_min"), Param.f32("dt_max")] if self.dt_limit else []),
        ]

    def constants(self) -> dict[str, Any]:
        own = {"convolved": ("x", "B", "C"), "A_is_log": self.A_is_log}
        return SsuTokensSpec.constants(self) | self.conv_constants() | own


def problems(
    one: mamba2_layer.Mamba2LayerProblem, tokens: int, intermediates: bool = False, update_state: bool = True
) -> list[Mamba2LayerTokensProblem]:
    """What a call of so many tokens asks for, where one of a single token asks for `one`: for the states that a call leaves behind, and,
    with slots, for one per token, whose windows roll; or with intermediates, of the state's type, and windows beside them."""
    given = {f.name: getattr(one, f.name) for f in fields(one)} | {"conv_tokens": tokens}
    kept = {"intermediate_states": one.state, "conv_windows": Saved.RUNS} if intermediates else {}
    found = [Mamba2LayerTokensProblem(**given, **kept, update=Update.FINAL if update_state else Update.NONE)]
    if one.index is not Index.NONE and update_state and not intermediates and one.conv_len == one.conv_width - 1:
        rolls = {"accepted": Index.I32, "update": Update.EACH, "pool": PoolMode.SPLIT, "conv_len": one.conv_width - 2 + tokens}
        found.append(Mamba2LayerTokensProblem(**given | rolls))
    return found


def _spec(problem: Mamba2LayerTokensProblem, **how: Any) -> Mamba2LayerTokensSpec:
    return Mamba2LayerTokensSpec(**{f.name: getattr(problem, f.name) for f in fields(Mamba2LayerTokensProblem)}, **how)


def space(problem: Mamba2LayerTokensProblem, arch: Arch) -> Iterator[Mamba2LayerTokensSpec]:
    """Every legal variant of a problem within the axes worth trying."""
    specs = (_spec(problem, **how) for how in row_engine.axes())
    return (spec for spec in specs if not spec.violations(arch))


def _rules(problem: Mamba2LayerTokensProblem) -> list[Rule]:
    """Blocks with a thread for each four channels, so that all of them convolve at once. Few heads are spread over more SMs: tokens come
    one behind the other, and what a thread does for each is most of the time then. Measured on an H200 with 128 heads, not with few."""
    wide = 2 if problem.shared_channels >= 512 else 1
    if problem.state is not DType.F32:
        return [
            Rule("few", 1.5, tile_kib=4 * wide, ilp=1),
            Rule("latency", 64, tile_kib=16 * wide),
            Rule("bandwidth", float("inf"), tile_kib=16 * wide, prefetch=132),
        ]
    return [
        Rule("few", 3, tile_kib=8 * wide, ilp=1),
        Rule("latency", 48, tile_kib=16 * wide),
        Rule("bandwidth", float("inf"), tile_kib=32, prefetch=132),
    ]


def _registers(problem: Mamba2LayerTokensProblem, how: dict[str, Any], arch: Arch) -> dict[str, Any]:
    """`how`, with registers for 512 threads per SM; for 768 where ptxas can do that without spills; with all where operands are gathered.
    Left alone, it spills a few bytes of some variants, to get below the next of such steps."""
    vectors = {problem.conv_loads, problem.conv_taps, problem.state_loads} == {Loads.VECTOR} and not problem.philox_rounds
    narrow = problem.state is not DType.F32 and problem.conv_dtype is not DType.F32 and problem.d_state == 128
    short = problem.conv_tokens <= 4 and problem.conv_width <= 4
    fits = arch.number == SM90.number and narrow and short and how["threads"] == 256 and how["ilp"] == 4 and not how.get("prefetch")
    most = 768 if fits else 512
    return how | {"min_blocks": max(1, most // how["threads"]) if vectors else 1}


def candidates(
    problem: Mamba2LayerTokensProblem, batch: int, arch: Arch, pdl: bool
) -> Iterator[tuple[str, Mamba2LayerTokensSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    norm = {"norm_threads": 32 if batch * problem.conv_tokens * problem.norm_groups <= FEW else 128}
    for rule, how, reason in row_engine.choices(problem, _rules(problem), batch, arch, pdl):
        if how is not None and problem.accepted is not Index.NONE:
            how["prefetch"] = 0
        yield rule, None if how is None else _spec(problem, **_registers(problem, how, arch), **norm), reason
