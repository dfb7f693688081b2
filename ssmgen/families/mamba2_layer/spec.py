"""mamba2_layer: decode steps of a Mamba-2 layer between its projections: short convolution, state updates, gated norm.

Two kernels: selective_state_update's, which convolves x, B and C itself, then the gated norm. Several tokens are convolved all at once,
directly into the shared memory that tokens are staged in, and the norm covers all their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.layers.norm import NormedLayer
from ...engine.layers.problem import with_registers
from ...engine.norm_kernel import FEW
from ...engine.recurrences.mamba.kernel import constants_of, row_scalars_of, staged_violations
from ...engine.recurrences.mamba.problem import SsuProblem
from ...engine.rows import RowSpec, Rule
from ...engine.window import StateLayout
from ...spec.kernel import LATER, SM90, Arch, DType, Index, KernelSpec, Loads, Needs, Param, Pdl, PoolMode, Update, must
from ...spec.variants import spec_of
from .operands import OPERANDS

OPERATOR = "mamba2_layer"
EARLY = 16  # sequences up to which the layer triggers early: the out-projection of the same rows loads its weights at the same time


@dataclass(frozen=True, kw_only=True)
class Mamba2LayerProblem(NormedLayer, SsuProblem):
    """The fields that a call fixes. x, B and C are channels of xBC, whose dtype is x's. `z` is the dtype of a gate without a norm."""

    A_is_log: bool = False  # A is the logarithm of its absolute value

    @property
    def conv_dtype(self) -> DType:
        return self.x

    @property
    def conv_input(self) -> str:
        return "xBC"

    @property
    def norm_groups(self) -> int:
        return self.nheads * self.headdim // self.norm.size if self.norm.weight else 0

    @property
    def shared_channels(self) -> int:
        return 2 * self.d_state

    def fields_of_tokens(self, intermediates: bool) -> dict[str, Any]:
        return {"several": True, "intermediate_states": self.state if intermediates else None}

    def faults(self) -> list[str]:
        return [
            *SsuProblem.faults(self),
            *self.layer_faults(self.nheads, self.headdim),
            *must(self.norm.weight is None or self.z is None, "z is set with a norm, which has its own gate; expected one of them"),
            *must(not self.narrow, f"state is {self.state.value}; expected f32, f16 or bf16 in a layer"),
            *must(not self.guarded, f"d_state is {self.d_state}; expected a multiple of 4 in a layer"),
            *must(self.tied, "tied is no; expected yes: a layer has one A, dt and dt_bias per head"),
            *must(
                self.x == self.B == self.C,
                f"x, B and C are {self.x.value}, {self.B.value} and {self.C.value}; expected one dtype: they are one tensor",
            ),
            *must(
                not self.ragged and self.parents is Index.NONE,
                "cu_seqlens or parents is set; expected none: a layer takes neither packed sequences nor draft trees",
            ),
            *must(
                self.pool is PoolMode.SINGLE or self.update is Update.EACH,
                f"pool is split and update is {self.update.value}; expected pool=single, or update=each with a slot per token",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class Mamba2LayerSpec(RowSpec, Mamba2LayerProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR

    norm_threads: int = 32  # threads per block of the norm, about
    norm_pdl: Pdl = field(default=Pdl.TRIGGER_LOADED, metadata=LATER)  # where the norm lets dependents start, unless pdl is off
    windows_ahead: bool = field(default=False, metadata=LATER)  # with a block's tile, also prefetches its windows into L2

    @property
    def template(self) -> str:
        return f"mamba2_layer/{'several_tokens' if self.several else 'one_token'}.cu.j2"

    @property
    def chunk(self) -> int:
        """Tokens that are staged at a time: all of them."""
        return self.conv.tokens

    @property
    def needs(self) -> Needs:
        needs = super().needs
        return replace(needs, streaming=self.intermediates, lines=needs.lines or self.windows_ahead)

    def with_early_triggers(self) -> KernelSpec:
        """The norm triggers early. The first kernel keeps its trigger: the norm loads its gate before that kernel has ended."""
        return self if self.pdl is Pdl.OFF or self.norm.weight is None else replace(self, norm_pdl=Pdl.TRIGGER_FIRST)

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        first = replace(self, norm_pdl=Pdl.TRIGGER_LOADED)  # it does not depend on the norm's trigger
        return (first, *self.norm_kernels(self.norm_threads, self.norm_pdl))

    def violations(self, arch: Arch) -> list[str]:
        if found := RowSpec.violations(self, arch) or self.conv_violations(self.tile):
            return found
        ahead = must(
            not self.windows_ahead or (self.prefetch > 0 and not self.several and self.conv.layout is StateLayout.RUNS),
            "windows_ahead is yes; expected prefetch, one token and conv_layout=runs with it",
        )
        return [
            *ahead,
            *self.norm_pdl_violations(self.norm_pdl, self.norm.weight is not None),
            *staged_violations(self),
            *(problem for kernel in self.kernels[1:] for problem in kernel.violations(arch)),
        ]

    @property
    def shared_bytes(self) -> int:
        """Bytes of staged tokens (B, C, the tile's x and z, dt, decay, perhaps a slot) and of the last-block flag of a group."""
        words = 2 * self.d_state + len(self.row_scalars()) * self.tile + (4 if self.update is Update.EACH else 2)
        return 4 * self.chunk * words + 16

    @property
    def stem(self) -> str:
        shape, tokens = f"h{self.nheads}p{self.headdim}n{self.d_state}g{self.ngroups}", f"t{self.conv.tokens}_" if self.several else ""
        update = f"{self.update.value}_" if self.several else ""
        return f"mamba2_layer_{tokens}{shape}_{self.state.value}_{update}{self.how()}"

    def row_scalars(self) -> list[str]:
        return row_scalars_of(self)

    norm_inside: ClassVar[bool] = False  # the norm is a separate kernel
    table: ClassVar[Any] = OPERANDS

    def parameters(self) -> list[Param]:
        limit = [Param.f32("dt_min"), Param.f32("dt_max")] if self.dt_limit else []
        return [*self.layer_parameters(OPERANDS), *limit]

    def constants(self) -> dict[str, Any]:
        return constants_of(self) | self.conv_constants() | {"convolved": ("x", "B", "C"), "A_is_log": self.A_is_log}


def space(problem: Mamba2LayerProblem, arch: Arch) -> Iterator[Mamba2LayerSpec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    further: dict[str, Any] = {"prefetch": 264, "windows_ahead": True}
    hows = (how | more for how in row_engine.axes(ahead=132) for more in ([{}, further] if how["prefetch"] else [{}]))
    return row_engine.legal(lambda how: spec_of(Mamba2LayerSpec, problem, **how), hows, arch)


TWO_BYTES = [  # measured on an H100 and an H200
    Rule("few", 4, tile_kib=8, pdl=Pdl.TRIGGER_TOP),
    Rule("latency", 128, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264),  # with windows; prefetching 264 tiles alone is not faster than 132
]
# Rounded with noise, which takes more time than the memory: blocks of 64 threads took 13 to 14 % less on an H200.
NOISY = [*TWO_BYTES[:-1], Rule("bandwidth", float("inf"), tile_kib=16, steps=4)]
TWO_BYTES_LONG = [replace(TWO_BYTES[0], tile_kib=16), *TWO_BYTES[1:]]  # rows of more than 256 bytes: the same number per block
FOUR_BYTES = [
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=32, prefetch=132),
]


def _rules_of_tokens(problem: Mamba2LayerProblem) -> list[Rule]:
    """Blocks with a thread per four channels, so that all channels convolve at once. Few heads are spread over more SMs: tokens run one
    after the other, and a thread's work per token then takes most of the time. Measured on an H200 with 128 heads, not with few."""
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


def _registers_of_tokens(problem: Mamba2LayerProblem, how: dict[str, Any], arch: Arch) -> dict[str, Any]:
    """`how`, with registers for 512 threads per SM; for 768 if ptxas can do that without spills; with all if operands are gathered.
    Without a bound, ptxas spills a few bytes in some variants, to reach the next lower register step."""
    vectors = {problem.conv.loads, problem.conv.taps, problem.state_loads} == {Loads.VECTOR} and not problem.philox_rounds
    narrow = problem.state is not DType.F32 and problem.conv_dtype is not DType.F32 and problem.d_state == 128
    short = problem.conv.tokens <= 4 and problem.conv.width <= 4
    fits = arch.number == SM90.number and narrow and short and how["threads"] == 256 and how["ilp"] == 4 and not how.get("prefetch")
    most = 768 if fits else 512
    return how | {"min_blocks": max(1, most // how["threads"]) if vectors else 1}


def candidates(problem: Mamba2LayerProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, Mamba2LayerSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    norm_threads = 32 if batch * (problem.conv.tokens or 1) * problem.norm_groups <= FEW else 128
    two = TWO_BYTES_LONG if problem.d_state * problem.state.size > 256 else NOISY if problem.philox_rounds else TWO_BYTES
    rules = _rules_of_tokens(problem) if problem.several else FOUR_BYTES if problem.state is DType.F32 else two
    for rule, how, reason in row_engine.choices(problem, rules, batch, arch, pdl):
        if how is None:
            yield rule, None, reason
            continue
        if problem.accepted is not Index.NONE:
            how["prefetch"] = 0  # a prefetch does not know which column the sequence starts from
        if how.get("prefetch") and not problem.several and problem.state.size == 2 and problem.conv.layout is StateLayout.RUNS:
            how["windows_ahead"] = True  # an H200 takes 3.5 % less at batch 64, 4 at 256; states of other sizes were not measured
        how = _registers_of_tokens(problem, how, arch) if problem.several else with_registers(how, arch)
        yield rule, spec_of(Mamba2LayerSpec, problem, **how, norm_threads=norm_threads), reason
