"""selective_state_update: decode steps of Mamba-1 and Mamba-2, one or several tokens per call.

A row of the engine is one of headdim, d_state long.
Mamba-1 is one head of `dim` rows; its A and dt differ per row ("untied"). Mamba-2 ties A, dt and dt_bias per head.

Of several tokens, which Mamba-2 has, a block stages some in shared memory and walks them with its rows in registers: a state is read once,
and written as often as the call asks for. Token by token the arithmetic is that of the single-token kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.rows import RowSpec, Rule
from ...spec import FP8, LATER, Arch, Index, Loads, Narrow, Needs, Param, Pdl, Update, must
from .operands import OPERANDS
from .problem import SsuProblem

OPERATOR = "selective_state_update"
SHARED_BYTES = 48 * 1024


@dataclass(frozen=True, kw_only=True)
class SsuSpec(RowSpec, SsuProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR

    chunk: int = field(default=8, metadata=LATER)  # tokens staged at a time, where a call has several

    @property
    def template(self) -> str:
        return f"selective_state_update/{'several_tokens' if self.several else 'one_token'}.cu.j2"

    def violations(self, arch: Arch) -> list[str]:
        modern = must(arch >= FP8 or Narrow.E4M3 not in self.narrow, f"fp8 states need sm_89, not {arch}")
        return RowSpec.violations(self, arch) or staged_violations(self) or modern

    @property
    def needs(self) -> Needs:
        by_byte = any(t.size == 1 for t in self.narrow) and self.state_loads is Loads.ELEMENT
        return replace(super().needs, streaming=self.intermediates, narrow=bool(self.narrow), bytes=by_byte, guarded=self.guarded)

    @property
    def owned_once(self) -> bool:
        steps, whole = self.tile // self.rows_per_step, self.rows % self.tile == 0
        return self.scaled and self.tied and not self.several and whole and 1 < self.ilp < self.lanes == steps * self.ilp

    @property
    def shared_bytes(self) -> int:
        """Staged tokens: B and C, x and z of the tile's rows, dt, its decay and a parent."""
        return 4 * self.chunk * (2 * self.row_room + len(self.row_scalars()) * self.tile + 3) if self.several else 0

    @property
    def stem(self) -> str:
        kind = "ssu_ragged" if self.ragged else "ssu_tokens" if self.several else "ssu"
        return f"{kind}_h{self.nheads}p{self.headdim}n{self.d_state}g{self.ngroups}_{self.state.value}_{self.how()}"

    def row_scalars(self) -> list[str]:
        """Operands with an element per row and token."""
        return ["x", *(["z"] if self.z else [])]

    def operands(self) -> list[str]:
        """Tensor arguments in order."""
        return OPERANDS.of(self)

    def strides(self) -> list[tuple[str, str, str]]:
        """(operand, axis, width) of every stride the kernel takes, in elements."""
        return OPERANDS.strides(self)

    def parameters(self) -> list[Param]:
        rows = self.intermediate_indices is not Index.NONE
        counts = {
            "tokens": self.several and not self.ragged,
            "total_tokens": self.ragged,
            "columns": self.accepted is not Index.NONE,
            "dst_columns": self.each and self.ragged,
            "parent_columns": self.parents is not Index.NONE and self.ragged,
            "kept_columns": self.intermediates and self.ragged,
        }
        return [
            *OPERANDS.pointers(self),
            *([] if self.index is Index.NONE else [Param.i64("slots"), Param.i64("pad_slot_id")]),
            *([Param.i64("kept_rows")] if rows else []),
            *OPERANDS.stride_params(self),
            *(Param.u32(name) for name, there in counts.items() if there),
            *([Param.f32("dt_min"), Param.f32("dt_max")] if self.dt_limit else []),
        ]

    def constants(self) -> dict[str, Any]:
        return {
            "pooled": self.index is not Index.NONE,
            "split": self.split,
            "final_state": self.update is Update.FINAL,
            "each": self.each,
            "convolved": (),  # operands that the kernel makes itself
            "conv_rolls": False,
            "A_is_log": False,
            "ragged": self.ragged,
            "accepted": self.accepted is not Index.NONE,
            "tree": self.parents is not Index.NONE,
            "rows_by_index": self.intermediate_indices is not Index.NONE,
            "rounded": self.rounded,
            "kept_scaled": self.kept_scaled,
            "narrow_noise": self.rounded & {t.value for t in self.narrow},
            "tail": self.headdim % self.tile != 0,
            "vector_state": self.state_loads is Loads.VECTOR,
            "vector_operands": self.operand_loads is Loads.VECTOR,
        }


def staged_violations(spec: Any) -> list[str]:
    """What stages several tokens cannot do, if it does."""
    if not spec.several:
        return []
    return [
        *must(spec.tile == spec.rows_per_step, "several tokens need all rows of a tile in flight at once"),
        *must(spec.shared_bytes <= SHARED_BYTES, f"{spec.shared_bytes} bytes of shared memory exceed 48 KiB"),
        *must(not spec.prefetch or spec.accepted is Index.NONE, "the bulk L2 prefetch does not know the column that is started from"),
    ]


def _spec(problem: SsuProblem, how: dict[str, Any]) -> SsuSpec:
    """A variant that stages as many tokens at a time as fit: 8, or fewer of long rows."""
    given = {f.name: getattr(problem, f.name) for f in fields(SsuProblem)}
    if problem.several:
        token = 4 * (2 * problem.d_state + 2 * how["tile"] + 3)
        given["chunk"] = next((n for n in (8, 4) if n * token <= SHARED_BYTES), 2)
    return SsuSpec(**given, **how)


def space(problem: SsuProblem, arch: Arch) -> Iterator[SsuSpec]:
    """Every legal variant of a problem within the axes worth trying."""
    specs = (_spec(problem, how) for how in row_engine.axes(16 if problem.narrow else 8))
    return (spec for spec in specs if not spec.violations(arch))


WIDE = [  # d_state above 32
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264),
]
# Of rows of at most 256 bytes of such states; measured on an H100 and an H200.
TWO_BYTES = [Rule("fewest", 0.5, tile_kib=4, pdl=Pdl.TRIGGER_TOP, ilp=1), *WIDE]
# A lane goes over a row of more than 256 bytes in two passes or more, each of which asks for its shares of all its rows: fewer rows at
# once make more blocks, which few states need more. By bytes of an element; measured on an H100 and an H200.
LONG_ROWS = {
    2: [Rule("smallest", 4, tile_kib=4, ilp=1), *WIDE],
    4: [Rule("smallest", 10, tile_kib=8, ilp=2), *WIDE],
}
# Of 4 bytes, with heads that whole blocks of four warps do not divide: one warp a block. An H100 gains 3.6 % where the card is full for
# long, an H200 neither gains nor loses.
UNEVEN = [*LONG_ROWS[4][:-1], Rule("bandwidth", 1024, tile_kib=16, prefetch=264), Rule("largest", float("inf"), tile_kib=4, prefetch=264)]
ONE_BYTE = [  # of such states: fewer fixed instructions in several steps, and as many bytes ahead as with two
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=528, steps=2),
]
INT8 = [  # two rows at once leave room for more warps; 528 tiles ahead were measured to be 1 % slower than 264
    Rule("latency", 48, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264, steps=4, ilp=2),
]
NARROW = [
    Rule("fewest", 1, tile_kib=2, pdl=Pdl.TRIGGER_SLOT),  # measured on an H100 and an H200
    Rule("latency", 4, tile_kib=8, pdl=Pdl.TRIGGER_SLOT),
    Rule("middle", 20, tile_kib=16),
    Rule("bandwidth", float("inf"), tile_kib=16, prefetch=264),
]
SEVERAL_TOKENS = [  # measured on an H200 with every token's state kept; docs/performance.md
    Rule("few", 1, tile_kib=2, ilp=1),
    Rule("latency", 48, tile_kib=8),
    Rule("bandwidth", float("inf"), tile_kib=8, prefetch=132),
]
SEVERAL_TOKENS_F32 = [SEVERAL_TOKENS[0], Rule("latency", 48, tile_kib=8, ilp=1), SEVERAL_TOKENS[-1]]  # measured on an H100, too


def candidates(problem: SsuProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, SsuSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    size = problem.state.size
    long = LONG_ROWS.get(size, WIDE) if problem.d_state * size > 256 else TWO_BYTES if size == 2 else WIDE
    long = UNEVEN if size == 4 and long is LONG_ROWS[4] and problem.headdim % 32 else long
    wide = INT8 if problem.state is Narrow.I8 else ONE_BYTE if size == 1 else long
    several = SEVERAL_TOKENS_F32 if size == 4 else SEVERAL_TOKENS
    rules = several if problem.several else NARROW if problem.d_state <= 32 else wide
    for rule, how, reason in row_engine.choices(problem, rules, batch, arch, pdl):
        if how is not None and problem.accepted is not Index.NONE:
            how["prefetch"] = 0
        yield rule, None if how is None else _spec(problem, how), reason
