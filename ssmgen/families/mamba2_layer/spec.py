"""mamba2_layer: a decode step of a Mamba-2 layer between its projections: short convolution, state update, gated norm.

Two kernels: selective_state_update's row engine, which convolves x, B and C itself, and the gated norm behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.rows import RowSpec, Rule
from ...engine.short_conv import ShortConv, pointers, with_registers
from ...spec import Arch, DType, Index, KernelSpec, Param, PoolMode, must
from ..gated_rms_norm.layer_spec import LayerGatedNorm
from ..gated_rms_norm.spec import FEW
from ..selective_state_update.spec import SsuProblem, SsuSpec

OPERATOR = "mamba2_layer"


@dataclass(frozen=True, kw_only=True)
class Mamba2LayerProblem(ShortConv, LayerGatedNorm, SsuProblem):
    """What a call fixes. x, B and C are channels of xBC, whose dtype is x's. `z` is of a gate without a norm."""

    A_is_log: bool = False  # A is the logarithm of its absolute value

    @property
    def conv_dtype(self) -> DType:
        return self.x

    @property
    def conv_input(self) -> str:
        return "xBC"

    @property
    def norm_groups(self) -> int:
        """Of a row."""
        return self.nheads * self.headdim // self.norm_size if self.norm else 0

    @property
    def shared_channels(self) -> int:
        return 2 * self.d_state

    def faults(self) -> list[str]:
        return [
            *SsuProblem.faults(self),
            *self.conv_faults(self.headdim),
            *self.norm_faults(self.nheads * self.headdim, self.out),
            *must(self.norm is None or self.z is None, "z gates by itself or in the norm"),
            *must(self.tied, "a layer's A, dt and dt_bias are one value per head"),
            *must(self.x == self.B == self.C, "x, B and C are of one dtype: they are one tensor"),
            *must(self.pool is PoolMode.SINGLE, "the window and the state of a layer are updated in place"),
        ]


@dataclass(frozen=True, kw_only=True)
class Mamba2LayerSpec(RowSpec, Mamba2LayerProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "mamba2_layer/one_token.cu.j2"

    norm_threads: int = 32  # of a block of the norm, about

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        return (self, *self.norm_kernels(self.out, self.index, self.norm_threads, self.pdl))

    def violations(self, arch: Arch) -> list[str]:
        found = RowSpec.violations(self, arch) or self.conv_violations(self.tile)
        return found or [problem for kernel in self.kernels[1:] for problem in kernel.violations(arch)]

    @property
    def stem(self) -> str:
        return f"mamba2_layer_h{self.nheads}p{self.headdim}n{self.d_state}g{self.ngroups}_{self.state.value}_{self.how()}"

    def operands(self) -> list[str]:
        """Tensor arguments in order."""
        optional = [name for name in ("D", "z", "dt_bias") if getattr(self, name) is not None]
        pooled = [] if self.index is Index.NONE else ["state_indices"]
        seed = ["rand_seed"] if self.philox_rounds else []
        return ["state", *self.conv_operands(), "dt", "A", *optional, "out", *pooled, *seed, "arrivals"]

    def strides(self) -> list[tuple[str, str, str]]:
        """(operand, axis, width) of every stride the kernel takes, in elements. Only the distance between slots is 64-bit."""
        axes = self.conv_strides() | {
            "state": ["slot"],
            "dt": ["batch", "head"],
            "A": ["head"],
            "D": ["head", "row"],
            "z": ["batch", "head", "row"],
            "dt_bias": ["head"],
            "out": ["batch", "head", "row"],
            "state_indices": ["batch"],
            "rand_seed": ["slot"],
        }
        return [(op, axis, "i64" if axis == "slot" else "u32") for op in self.operands() for axis in axes[op]]

    def parameters(self) -> list[Param]:
        element = {f.name: getattr(self, f.name).value for f in fields(self) if isinstance(getattr(self, f.name), DType)}
        element |= self.conv_elements() | {"state_indices": "int" if self.index is Index.I32 else "i64", "rand_seed": "i64"}
        strides = [(Param.i64 if width == "i64" else Param.u32)(f"{op}_{axis}") for op, axis, width in self.strides()]
        strides.sort(key=lambda p: p.code != "q")  # 8-byte arguments first: no padding anywhere in the buffer
        pad = [] if self.index is Index.NONE else [Param.i64("slots"), Param.i64("pad_slot_id")]
        limit = [Param.f32("dt_min"), Param.f32("dt_max")] if self.dt_limit else []
        return [*pointers(self.operands(), element, ("state", "conv_state", "out", "arrivals")), *pad, *strides, *limit]

    def constants(self) -> dict[str, Any]:
        return SsuSpec.constants(self) | self.conv_constants() | {"convolved": ("x", "B", "C"), "A_is_log": self.A_is_log}


def space(problem: Mamba2LayerProblem, arch: Arch) -> Iterator[Mamba2LayerSpec]:
    """Every legal variant of a problem within the axes worth trying."""
    given = {f.name: getattr(problem, f.name) for f in fields(Mamba2LayerProblem)}
    specs = (Mamba2LayerSpec(**given, **how) for how in row_engine.axes())
    return (spec for spec in specs if not spec.violations(arch))


TWO_BYTES = [  # in one step the L2 prefetch needs registers that the convolution has
    Rule("latency", 128, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=132, steps=2),
]
FOUR_BYTES = [
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=32, prefetch=132),
]


def candidates(problem: Mamba2LayerProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, Mamba2LayerSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    given = {f.name: getattr(problem, f.name) for f in fields(Mamba2LayerProblem)}
    norm = {"norm_threads": 32 if batch * problem.norm_groups <= FEW else 128}
    for rule, how, reason in row_engine.choices(problem, FOUR_BYTES if problem.state is DType.F32 else TWO_BYTES, batch, arch, pdl):
        yield rule, None if how is None else Mamba2LayerSpec(**given, **with_registers(how, arch), **norm), reason
