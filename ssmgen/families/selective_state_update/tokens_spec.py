"""selective_state_update of several tokens per sequence: Mamba-2, whose A, dt and dt_bias are tied per head.

A row of the engine is one of headdim, d_state long. A block stages tokens in shared memory and walks them with its rows in registers: a
state is read once, and written as often as the call asks for. Token by token the arithmetic is that of the single-token kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.rows import RowSpec, Rule
from ...spec import Arch, DType, Index, Loads, Needs, Param, PoolMode, must
from ..linear_attention.problem import Update
from .spec import SsuProblem

OPERATOR = "selective_state_update_tokens"
SHARED_BYTES = 48 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SsuTokensProblem(SsuProblem):
    """What a call fixes. The numbers of sequences and of tokens are not among it."""

    cu_seqlens: Index = Index.NONE  # sequences of different lengths, packed
    accepted: Index = Index.NONE  # type of num_accepted_tokens, which picks the column of state_indices to start from
    update: Update = Update.FINAL
    intermediate_states: DType | None = None  # the state after each token also goes to a buffer [rows, tokens, …]
    intermediate_indices: Index = Index.NONE
    parents: Index = Index.NONE  # a draft tree

    @property
    def intermediates(self) -> bool:
        return self.intermediate_states is not None

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens is not Index.NONE

    @property
    def rounded(self) -> set[str]:
        """Types that noise is rounded to."""
        stored = [self.intermediate_states, *([] if self.update is Update.NONE else [self.state])]
        return {t.value for t in stored if t in (DType.F16, DType.BF16)} if self.philox_rounds else set()

    def faults(self) -> list[str]:
        """What no variant could serve."""
        return [
            *super(SsuTokensProblem, self).faults(),
            *must(self.tied, "several tokens need A, dt and dt_bias tied per head: [heads], or views with stride 0"),
            *must(self.d_state % 4 == 0, f"several tokens need a d_state of a multiple of 4, not {self.d_state}"),
            *must(self.pool is PoolMode.SINGLE or self.update is not Update.NONE, "a split pool that is not written"),
            *must(self.update is not Update.EACH or self.pool is PoolMode.SPLIT, "a state per token needs a slot for each"),
            *must(self.accepted is Index.NONE or self.index is not Index.NONE, "num_accepted_tokens needs slot indices"),
            *must(self.intermediates or self.intermediate_indices is Index.NONE, "rows of intermediate states without such states"),
            *must(self.intermediates or self.parents is Index.NONE, "a draft tree needs intermediate states"),
            *must(not self.philox_rounds or bool(self.rounded), "noise without an f16 or bf16 state that is written"),
        ]


@dataclass(frozen=True, kw_only=True)
class SsuTokensSpec(RowSpec, SsuTokensProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "selective_state_update/several_tokens.cu.j2"

    chunk: int = 8  # tokens staged at a time

    def violations(self, arch: Arch) -> list[str]:
        found = RowSpec.violations(self, arch)
        if found:
            return found
        return [
            *must(self.tile == self.rows_per_step, "several tokens need all rows of a tile in flight at once"),
            *must(self.shared_bytes <= SHARED_BYTES, f"{self.shared_bytes} bytes of shared memory exceed 48 KiB"),
            *must(not self.prefetch or self.accepted is Index.NONE, "the bulk L2 prefetch does not know the column that is started from"),
        ]

    @property
    def needs(self) -> Needs:
        return replace(super().needs, streaming=self.intermediates)

    @property
    def shared_bytes(self) -> int:
        """Staged tokens: B and C, x and z of the tile's rows, dt, its decay and a parent."""
        return 4 * self.chunk * (2 * self.d_state + len(self.row_scalars()) * self.tile + 3)

    @property
    def stem(self) -> str:
        kind = "ssu_ragged" if self.ragged else "ssu_tokens"
        return f"{kind}_h{self.nheads}p{self.headdim}n{self.d_state}g{self.ngroups}_{self.state.value}_{self.how()}"

    def row_scalars(self) -> list[str]:
        """Operands with an element per row and token."""
        return ["x", *(["z"] if self.z else [])]

    def operands(self) -> list[str]:
        """Tensor arguments in order."""
        optional = {
            "D": self.D, "z": self.z, "dt_bias": self.dt_bias, "out": True,
            "state_indices": self.index is not Index.NONE,
            "dst_state_indices": self.pool is PoolMode.SPLIT,
            "num_accepted_tokens": self.accepted is not Index.NONE,
            "cu_seqlens": self.ragged,
            "parents": self.parents is not Index.NONE,
            "intermediate_states": self.intermediates,
            "intermediate_state_indices": self.intermediate_indices is not Index.NONE,
            "rand_seed": self.philox_rounds,
        }  # fmt: skip
        return ["state", "x", "dt", "A", "B", "C", *(name for name, there in optional.items() if there)]

    def strides(self) -> list[tuple[str, str, str]]:
        """(operand, axis, width) of every stride the kernel takes, in elements. Those between states are 64-bit."""
        token = ["token"] if self.ragged else ["batch", "token"]
        element = ["n"] if self.operand_loads is Loads.ELEMENT else []
        axes = {
            "state": ["slot"],
            **dict.fromkeys(("x", "z", "out"), [*token, "head", "row"]),
            **dict.fromkeys(("B", "C"), [*token, "group", *element]),
            "dt": [*token, "head"],
            "A": ["head"],
            "D": ["head", "row"],
            "dt_bias": ["head"],
            "state_indices": ["batch", *(["column"] if self.accepted is not Index.NONE else [])],
            "dst_state_indices": ["batch", *(["token"] if self.update is Update.EACH else [])],
            "num_accepted_tokens": ["batch"],
            "cu_seqlens": [],
            "parents": ["batch", "token"],
            "intermediate_states": ["row", "token"],
            "intermediate_state_indices": ["batch"],
            "rand_seed": ["slot"],
        }
        wide = {("state", "slot"), ("intermediate_states", "row"), ("intermediate_states", "token")}
        return [(op, axis, "i64" if (op, axis) in wide else "u32") for op in self.operands() for axis in axes[op]]

    def parameters(self) -> list[Param]:
        element = {f.name: getattr(self, f.name).value for f in fields(self) if isinstance(getattr(self, f.name), DType)}
        integer = {Index.I32: "int", Index.I64: "i64", Index.NONE: ""}
        element |= dict.fromkeys(("state_indices", "dst_state_indices"), integer[self.index])
        element |= {"num_accepted_tokens": integer[self.accepted], "cu_seqlens": integer[self.cu_seqlens]}
        element |= {"parents": integer[self.parents], "intermediate_state_indices": integer[self.intermediate_indices], "rand_seed": "i64"}
        written = ("state", "out", "intermediate_states")
        pointers = [Param.pointer(op, element[op], const=op not in written) for op in self.operands()]
        strides = [(Param.i64 if width == "i64" else Param.u32)(f"{op}_{axis}") for op, axis, width in self.strides()]
        strides.sort(key=lambda p: p.code != "q")  # 8-byte arguments first: no padding anywhere in the buffer
        rows = self.intermediate_indices is not Index.NONE
        counts = {
            "tokens": not self.ragged,
            "total_tokens": self.ragged,
            "columns": self.accepted is not Index.NONE,
            "dst_columns": self.update is Update.EACH and self.ragged,
            "parent_columns": self.parents is not Index.NONE and self.ragged,
            "kept_columns": self.intermediates and self.ragged,
        }
        return [
            *pointers,
            *([] if self.index is Index.NONE else [Param.i64("slots"), Param.i64("pad_slot_id")]),
            *([Param.i64("kept_rows")] if rows else []),
            *strides,
            *(Param.u32(name) for name, there in counts.items() if there),
            *([Param.f32("dt_min"), Param.f32("dt_max")] if self.dt_limit else []),
        ]

    def constants(self) -> dict[str, Any]:
        return {
            "pooled": self.index is not Index.NONE,
            "split": self.pool is PoolMode.SPLIT,
            "final_state": self.update is Update.FINAL,
            "each": self.update is Update.EACH,
            "convolved": (),  # operands that the kernel makes itself
            "conv_rolls": False,
            "A_is_log": False,
            "ragged": self.ragged,
            "accepted": self.accepted is not Index.NONE,
            "tree": self.parents is not Index.NONE,
            "rows_by_index": self.intermediate_indices is not Index.NONE,
            "rounded": self.rounded,
            "tail": self.headdim % self.tile != 0,
            "vector_state": self.state_loads is Loads.VECTOR,
            "vector_operands": self.operand_loads is Loads.VECTOR,
        }


def _chunk(problem: SsuTokensProblem, tile: int) -> int:
    """How many tokens can be staged at a time: 8, or fewer of long rows."""
    token = 4 * (2 * problem.d_state + 2 * tile + 3)
    return next((n for n in (8, 4) if n * token <= SHARED_BYTES), 2)


def space(problem: SsuTokensProblem, arch: Arch) -> Iterator[SsuTokensSpec]:
    """Every legal variant of a problem within the axes worth trying."""
    given = {f.name: getattr(problem, f.name) for f in fields(SsuTokensProblem)}
    specs = (SsuTokensSpec(**given, **how, chunk=_chunk(problem, how["tile"])) for how in row_engine.axes())
    return (spec for spec in specs if not spec.violations(arch))


# Measured on an H200 with every token's state kept; docs/performance.md.
RULES = [
    Rule("few", 1, tile_kib=4, ilp=2),
    Rule("latency", 48, tile_kib=8),
    Rule("bandwidth", float("inf"), tile_kib=8, prefetch=132),
]


def candidates(problem: SsuTokensProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, SsuTokensSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    given = {f.name: getattr(problem, f.name) for f in fields(SsuTokensProblem)}
    for rule, how, reason in row_engine.choices(problem, RULES, batch, arch, pdl):
        if how is not None:
            how |= {"chunk": _chunk(problem, how["tile"])} | ({"prefetch": 0} if problem.accepted is not Index.NONE else {})
        yield rule, None if how is None else SsuTokensSpec(**given, **how), reason
