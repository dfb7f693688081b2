"""selective_state_update: one decode step of Mamba-1 and Mamba-2.

Row-local in headdim: `lanes` lanes own one row of d_state elements, `vec` contiguous elements per lane and pass, and keep `ilp`
rows in flight. With d_state > 32 a row takes half a warp or all of it; with d_state <= 32 a warp holds many narrow rows.
Traffic per row is 2 * d_state * sizeof(state); everything else is a few per cent, so the floor is the speed of copying the state.

Mamba-1 is one head of `dim` rows; its A and dt differ per row ("untied"). Mamba-2 ties A, dt and dt_bias per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, ClassVar

from ..spec import SM90, Arch, DType, Index, KernelSpec, Loads, Param, Pdl, PoolMode, is_pow2, must

OPERATOR = "selective_state_update"


@dataclass(frozen=True, slots=True, kw_only=True)
class SsuProblem:
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

    def faults(self) -> list[str]:
        """What no variant could serve."""
        return [
            *must(self.d_state >= 2 and self.d_state % min(4, self.d_state) == 0, f"d_state {self.d_state} is not 2 or a multiple of 4"),
            *must(self.d_state <= 1024, f"d_state {self.d_state} is above 1024"),
            *must(self.headdim >= 1, f"headdim {self.headdim} is not positive"),
            *must(self.nheads % self.ngroups == 0, f"nheads {self.nheads} is not a multiple of ngroups {self.ngroups}"),
            *must(self.headdim * self.d_state * self.nheads < 2**31, "one slot of the state has 2^31 elements or more"),
            *must(self.pool is PoolMode.SINGLE or self.index is not Index.NONE, "a split pool needs slot indices"),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SsuSpec(SsuProblem, KernelSpec):
    """A problem, and how one variant computes it. No choice below changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "selective_state_update.cu.j2"

    lanes: int  # lanes per row; 32 = warp per row, fewer = several rows per warp
    vec: int  # contiguous elements per lane and pass; 16 bytes of state when aligned
    ilp: int = 4  # rows in flight per lane team; each lane then owns the scalars of one of them
    tile: int = 64  # rows per block
    threads: int = 128
    min_blocks: int = 0  # blocks per SM that ptxas must leave registers for; 0 = its own choice
    prefetch: int = 0  # ask L2 for the tile of the block this many blocks ahead; 0 = off
    pdl: Pdl = Pdl.OFF

    @property
    def passes(self) -> int:
        return self.d_state // (self.lanes * self.vec)

    @property
    def rows_per_step(self) -> int:
        """Rows that a block holds in flight at a time."""
        return self.threads // self.lanes * self.ilp

    @property
    def tiles(self) -> int:
        """Blocks per head."""
        return -(-self.headdim // self.tile)

    @property
    def threads_per_block(self) -> int:
        return self.threads

    def violations(self, arch: Arch) -> list[str]:
        shape = [
            *must(is_pow2(self.lanes) and self.lanes <= 32, f"lanes {self.lanes} is not a power of two up to 32"),
            *must(is_pow2(self.ilp), f"ilp {self.ilp} is not a power of two"),
            *must(is_pow2(self.vec), f"vec {self.vec} is not a power of two"),
            *must(self.threads % 32 == 0 and 32 <= self.threads <= 1024, f"threads {self.threads} is not 32 … 1024 in steps of 32"),
            *must(self.min_blocks >= 0 and self.prefetch >= 0, "min_blocks and prefetch are not negative"),
        ]
        if shape:
            return self.faults() + shape
        return [
            *self.faults(),
            *must(self.vec * self.state.size <= 16, f"vec {self.vec} of {self.state.value} is wider than 16 bytes"),
            *must(self.vec >= min(4, self.d_state), f"vec {self.vec} is below 4, the chain that every variant sums alike"),
            *must(
                self.passes * self.lanes * self.vec == self.d_state,
                f"d_state {self.d_state} is not a multiple of lanes {self.lanes} x vec {self.vec}",
            ),
            *must(self.ilp <= self.lanes, f"ilp {self.ilp} exceeds lanes {self.lanes}: a lane owns the scalars of one row"),
            *must(self.tile % self.rows_per_step == 0, f"tile {self.tile} is not a multiple of the {self.rows_per_step} rows in flight"),
            *must(self.tile < self.headdim + self.rows_per_step, f"tile {self.tile} exceeds headdim {self.headdim}"),
            *must(arch >= Arch(80), f"bf16 arithmetic needs sm_80, not {arch}"),
            *must(arch >= SM90 or self.pdl is Pdl.OFF, f"programmatic dependent launch needs sm_90, not {arch}"),
            *must(arch >= SM90 or not self.prefetch, f"the bulk L2 prefetch needs sm_90, not {arch}"),
            *must(
                not self.prefetch or (self.state_loads is Loads.VECTOR and self.vec * self.state.size == 16),
                "the bulk L2 prefetch needs an aligned state in 16-byte vectors",
            ),
            *must(
                not self.prefetch or self.headdim % self.tile == 0,
                f"the bulk L2 prefetch needs headdim {self.headdim} to be whole tiles of {self.tile}",
            ),
        ]

    @property
    def stem(self) -> str:
        shape = f"ssu_h{self.nheads}p{self.headdim}n{self.d_state}g{self.ngroups}_{self.state.value}"
        how = f"l{self.lanes}v{self.vec}i{self.ilp}t{self.tile}x{self.threads}"
        return "_".join([shape, how, *([f"pf{self.prefetch}"] if self.prefetch else []), *([] if self.pdl is Pdl.OFF else ["pdl"])])

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
        }
        return [(op, axis, "i64" if axis == "slot" else "u32") for op in self.operands() for axis in axes[op]]

    def operands(self) -> list[str]:
        """Tensor arguments in order."""
        pooled = [] if self.index is Index.NONE else ["state_indices"]
        split = ["dst_state_indices"] if self.pool is PoolMode.SPLIT else []
        return ["state", "x", "dt", "A", "B", "C", *self.optional(), "out", *pooled, *split]

    def parameters(self) -> list[Param]:
        element = {f.name: getattr(self, f.name).value for f in fields(self) if isinstance(getattr(self, f.name), DType)}
        element |= dict.fromkeys(("state_indices", "dst_state_indices"), "int" if self.index is Index.I32 else "i64")
        pointers = [Param.pointer(op, element[op], const=op not in ("state", "out")) for op in self.operands()]
        strides = [(Param.i64 if width == "i64" else Param.u32)(f"{op}_{axis}") for op, axis, width in self.strides()]
        strides.sort(key=lambda p: p.code != "q")  # 8-byte arguments first: no padding anywhere in the buffer
        pad = [] if self.index is Index.NONE else [Param.i64("pad_slot_id")]
        limit = [Param.f32("dt_min"), Param.f32("dt_max")] if self.dt_limit else []
        return [*pointers, *pad, *strides, *limit]

    def constants(self) -> dict[str, Any]:
        return {
            "pooled": self.index is not Index.NONE,
            "split": self.pool is PoolMode.SPLIT,
            "tail": self.headdim % self.tile != 0,
            "vector_state": self.state_loads is Loads.VECTOR,
            "vector_operands": self.operand_loads is Loads.VECTOR,
        }


def space(problem: SsuProblem, arch: Arch) -> Iterator[SsuSpec]:
    """Every legal variant of a problem within the axes worth trying: what a tuner searches, and what the tests hold to be bit-equal."""
    given = {f.name: getattr(problem, f.name) for f in fields(SsuProblem)}
    axes = {
        "lanes": (1, 2, 4, 8, 16, 32),
        "vec": (2, 4, 8),
        "ilp": (1, 2, 4, 8),
        "tile": (8, 16, 32, 64, 128, 256),
        "threads": (32, 64, 128, 256),
        "prefetch": (0, 264),
        "pdl": tuple(Pdl),
    }
    for values in product(*axes.values()):
        spec = SsuSpec(**given, **dict(zip(axes, values, strict=True)))
        if not spec.violations(arch):
            yield spec


# ---------------------------------------------------------------------------------------------------------------------------------
# Choosing a variant. Measured on an H200 (132 SMs); docs/performance.md holds what was tried.


@dataclass(frozen=True, slots=True)
class Rule:
    """Serves calls whose state traffic, both ways, is at most `max_mib`; the first rule of a table that does is taken."""

    name: str
    max_mib: float
    tile_kib: int  # state per block; each of its threads holds its shares of ILP rows at once, and that is all it does
    prefetch: int = 0
    pdl: Pdl = Pdl.TRIGGER_LOADED


WIDE = [  # d_state > 32
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264),
]
NARROW = [  # d_state <= 32
    Rule("latency", 4, tile_kib=8, pdl=Pdl.TRIGGER_SLOT),
    Rule("middle", 20, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264),
]
ILP = 4  # 8 needs too many registers, 2 leaves too little in flight


def _layout(problem: SsuProblem) -> dict[str, int]:
    """The lane map: 16 bytes of a row per lane, or 32 of a row longer than 256 bytes. An odd factor of d_state goes into passes."""
    odd = problem.d_state // (problem.d_state & -problem.d_state)  # 3 for 96
    even = problem.d_state // odd
    vec = min(16 // problem.state.size, even)
    share = 16 if even * problem.state.size <= 256 else 32
    lanes = max(1, min(32, even * problem.state.size // share))
    passes = problem.d_state // (vec * lanes)
    return {"vec": vec, "lanes": lanes, "ilp": max(1, min(ILP, lanes, 8 // passes))}


def _fit(problem: SsuProblem, rule: Rule) -> dict[str, Any]:
    """Lanes, rows and threads for this shape: about tile_kib per block, in a number of warps that divides headdim if one near does."""
    layout = _layout(problem)
    per_warp = 32 // layout["lanes"] * layout["ilp"]
    row_bytes = problem.d_state * problem.state.size
    most = max(1, min(8, rule.tile_kib * 1024 // (row_bytes * per_warp), -(-problem.headdim // per_warp)))
    fitting = [w for w in range(most * 3 // 2, most // 2, -1) if problem.headdim % (w * per_warp) == 0]
    warps = most if most in fitting or not fitting else fitting[0]
    return layout | {"threads": 32 * warps, "tile": warps * per_warp}


def candidates(problem: SsuProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, SsuSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    given = {f.name: getattr(problem, f.name) for f in fields(SsuProblem)}
    mib = 2 * batch * problem.nheads * problem.headdim * problem.d_state * problem.state.size / 2**20
    taken = False
    for rule in NARROW if problem.d_state <= 32 else WIDE:
        if taken or mib > rule.max_mib:
            reason = "an earlier rule applies" if taken else f"{mib:.1f} MiB of state traffic is above {rule.max_mib:g}"
            yield rule.name, None, reason
            continue
        taken = True
        how = _fit(problem, rule)
        aligned = problem.state_loads is Loads.VECTOR and how["vec"] * problem.state.size == 16
        prefetch = rule.prefetch if aligned and problem.headdim % how["tile"] == 0 and arch >= SM90 else 0
        yield rule.name, SsuSpec(**given, **how, prefetch=prefetch, pdl=rule.pdl if pdl else Pdl.OFF), ""
    layout = _layout(problem) | {"ilp": 1}
    warps = max(1, min(4, problem.headdim * layout["lanes"] // 32))
    how = layout | {"threads": 32 * warps, "tile": 32 * warps // layout["lanes"]}
    yield "generic", SsuSpec(**given, **how, pdl=Pdl.TRIGGER_LOADED if pdl else Pdl.OFF), ""
