"""selective_state_update: one decode step of Mamba-1 and Mamba-2.

A row of the engine is one of headdim, d_state long.
Mamba-1 is one head of `dim` rows; its A and dt differ per row ("untied"). Mamba-2 ties A, dt and dt_bias per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.rows import RowProblem, RowSpec, Rule
from ...spec import LATER, Arch, DType, Index, Loads, Param, Pdl, PoolMode, must

OPERATOR = "selective_state_update"


@dataclass(frozen=True, slots=True, kw_only=True)
class SsuProblem(RowProblem):
    """What a call fixes: shapes, dtypes and which operands there are. Batch size is not among it."""

    d_state: int
    headdim: int
    nheads: int = 1
    ngroups: int = 1
    state: DType = DType.F32
    x: DType = DType.BF16
    dt: DType = DType.BF16
    A: DType = DType.F32
    B: DType = DType.BF16
    C: DType = DType.BF16
    D: DType | None = None
    z: DType | None = None
    dt_bias: DType | None = None
    out: DType = DType.BF16
    tied: bool = True  # A, dt and dt_bias hold one value per head
    dt_softplus: bool = True
    dt_limit: bool = False
    index: Index = Index.NONE
    pool: PoolMode = PoolMode.SINGLE
    state_loads: Loads = Loads.VECTOR
    operand_loads: Loads = Loads.VECTOR  # of A, B and C; the other operands are one scalar per row
    philox_rounds: int = field(default=0, metadata=LATER)  # of the noise that f16 and bf16 states are rounded with; 0 = to nearest

    @property
    def heads(self) -> int:
        return self.nheads

    @property
    def row_elements(self) -> int:
        return self.d_state

    @property
    def rows(self) -> int:
        return self.headdim

    @property
    def row_dtype(self) -> DType:
        return self.state

    @property
    def row_loads(self) -> Loads:
        return self.state_loads

    @property
    def rounded(self) -> set[str]:
        """Types that noise is rounded to."""
        return {self.state.value} if self.philox_rounds else set()

    def faults(self) -> list[str]:
        """What no variant could serve."""
        return [
            *must(self.d_state >= 2 and self.d_state % min(4, self.d_state) == 0, f"d_state {self.d_state} is not 2 or a multiple of 4"),
            *must(self.d_state <= 1024, f"d_state {self.d_state} is above 1024"),
            *must(self.headdim >= 1, f"headdim {self.headdim} is not positive"),
            *must(self.nheads % self.ngroups == 0, f"nheads {self.nheads} is not a multiple of ngroups {self.ngroups}"),
            *must(self.headdim * self.d_state * self.nheads < 2**31, "one slot of the state has 2^31 elements or more"),
            *must(self.pool is PoolMode.SINGLE or self.index is not Index.NONE, "a split pool needs slot indices"),
            *must(not self.philox_rounds or self.d_state % 4 == 0, f"noise comes for 4 elements of a row, and d_state is {self.d_state}"),
            *must(self.rounded <= {"f16", "bf16"}, "noise is for f16 and bf16 states"),
        ]


@dataclass(frozen=True, kw_only=True)
class SsuSpec(RowSpec, SsuProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "selective_state_update/one_token.cu.j2"

    @property
    def stem(self) -> str:
        return f"ssu_h{self.nheads}p{self.headdim}n{self.d_state}g{self.ngroups}_{self.state.value}_{self.how()}"

    def optional(self) -> list[str]:
        return [name for name in ("D", "z", "dt_bias") if getattr(self, name) is not None]

    def strides(self) -> list[tuple[str, str, str]]:
        """(operand, axis, width) of every stride the kernel takes, in elements. Only the distance between slots is 64-bit."""
        rows = [] if self.tied else ["row"]
        state_axis = ["n"] if self.operand_loads is Loads.ELEMENT else []
        axes = {
            "state": ["slot"],
            "x": ["batch", "head", "row"],
            "dt": ["batch", "head", *rows],
            "A": ["head", *rows, *([] if self.tied else state_axis)],
            "B": ["batch", "group", *state_axis],
            "C": ["batch", "group", *state_axis],
            "D": ["head", "row"],
            "z": ["batch", "head", "row"],
            "dt_bias": ["head", *rows],
            "out": ["batch", "head", "row"],
            "state_indices": ["batch"],
            "dst_state_indices": ["batch"],
            "rand_seed": ["slot"],
        }
        return [(op, axis, "i64" if axis == "slot" else "u32") for op in self.operands() for axis in axes[op]]

    def operands(self) -> list[str]:
        """Tensor arguments in order."""
        pooled = [] if self.index is Index.NONE else ["state_indices"]
        split = ["dst_state_indices"] if self.pool is PoolMode.SPLIT else []
        seed = ["rand_seed"] if self.philox_rounds else []
        return ["state", "x", "dt", "A", "B", "C", *self.optional(), "out", *pooled, *split, *seed]

    def parameters(self) -> list[Param]:
        element = {f.name: getattr(self, f.name).value for f in fields(self) if isinstance(getattr(self, f.name), DType)}
        element |= dict.fromkeys(("state_indices", "dst_state_indices"), "int" if self.index is Index.I32 else "i64") | {"rand_seed": "i64"}
        pointers = [Param.pointer(op, element[op], const=op not in ("state", "out")) for op in self.operands()]
        strides = [(Param.i64 if width == "i64" else Param.u32)(f"{op}_{axis}") for op, axis, width in self.strides()]
        strides.sort(key=lambda p: p.code != "q")  # 8-byte arguments first: no padding anywhere in the buffer
        pad = [] if self.index is Index.NONE else [Param.i64("slots"), Param.i64("pad_slot_id")]
        limit = [Param.f32("dt_min"), Param.f32("dt_max")] if self.dt_limit else []
        return [*pointers, *pad, *strides, *limit]

    def constants(self) -> dict[str, Any]:
        return {
            "pooled": self.index is not Index.NONE,
            "split": self.pool is PoolMode.SPLIT,
            "final_state": True,
            "convolved": (),  # operands that the kernel makes itself
            "A_is_log": False,
            "rounded": self.rounded,
            "tail": self.headdim % self.tile != 0,
            "vector_state": self.state_loads is Loads.VECTOR,
            "vector_operands": self.operand_loads is Loads.VECTOR,
        }


def space(problem: SsuProblem, arch: Arch) -> Iterator[SsuSpec]:
    """Every legal variant of a problem within the axes worth trying."""
    given = {f.name: getattr(problem, f.name) for f in fields(SsuProblem)}
    specs = (SsuSpec(**given, **how) for how in row_engine.axes())
    return (spec for spec in specs if not spec.violations(arch))


WIDE = [  # d_state above 32
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264),
]
NARROW = [
    Rule("latency", 4, tile_kib=8, pdl=Pdl.TRIGGER_SLOT),
    Rule("middle", 20, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264),
]


def candidates(problem: SsuProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, SsuSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    given = {f.name: getattr(problem, f.name) for f in fields(SsuProblem)}
    for rule, how, reason in row_engine.choices(problem, NARROW if problem.d_state <= 32 else WIDE, batch, arch, pdl):
        yield rule, None if how is None else SsuSpec(**given, **how), reason
