"""mamba3_state_update: decode steps of Mamba-3, SISO and MIMO, one or several tokens per call.

A row of the engine is one of the headdim rows, with d_state elements. A block owns a head of a sequence: it makes the rows of B and C
ready (norm, bias, rotation) once, in shared memory, while its state arrives. No other block reads k, v or the angles of that head, so they
are updated in place without a race. For four ranks and a bf16 state, tensor cores multiply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...engine import rows as row_engine
from ...engine.recurrences.mamba3.problem import Mamba3Problem
from ...engine.rows import RowSpec, Rule
from ...spec.kernel import LATER, Arch, DType, Index, Loads, Needs, Param, Pdl, Update, must
from ...spec.variants import spec_of
from .operands import OPERANDS

OPERATOR = "mamba3_state_update"
SHARED_BYTES = 48 * 1024
MOST_STAGED = 64 * 128  # elements of a head: its state leaves room for seven blocks per SM


@dataclass(frozen=True, kw_only=True)
class Mamba3Spec(RowSpec, Mamba3Problem):
    """A problem, and how one variant computes it."""

    # Whether the state waits in shared memory instead of registers, for products.
    staged: bool = field(default=False, metadata=LATER)

    family: ClassVar[str] = OPERATOR
    table: ClassVar[Any] = OPERANDS

    @property
    def template(self) -> str:
        return "mamba3_state_update/mamba3_state_update.cu.j2"

    def violations(self, arch: Arch) -> list[str]:
        bytes_ = self.shared_bytes
        return RowSpec.violations(self, arch) or [
            *must(
                self.tiles == 1, f"tile is {self.tile}; expected all rows of a head: another block would read states that this one updates"
            ),
            *must(
                not self.several or self.tile == self.rows_per_step,
                f"tile is {self.tile}; expected {self.rows_per_step}, the rows in flight: several tokens keep all rows in registers",
            ),
            *must(
                not self.prefetch or self.accepted is Index.NONE,
                f"prefetch is {self.prefetch} with accepted tokens; expected 0: the column that a call starts from is in memory",
            ),
            *must(
                not self.products
                or (self.lanes, self.vec, self.ilp, self.headdim % self.tile, self.threads % self.headdim) == (4, 8, 2, 0, 0),
                f"lanes, vec, ilp, tile and threads are {(self.lanes, self.vec, self.ilp, self.tile, self.threads)}; expected 4, 8, 2, "
                f"{self.headdim} and {self.headdim} or {2 * self.headdim}: tensor cores take 16 rows",
            ),
            *must(
                not self.staged or (self.products and self.state_loads is Loads.VECTOR),
                "staged is yes; expected no: only products of tensor cores read an aligned state from shared memory",
            ),
            *must(bytes_ <= SHARED_BYTES, f"a block takes {bytes_} bytes of shared memory; expected at most {SHARED_BYTES}"),
        ]

    @property
    def needs(self) -> Needs:
        cores: dict[str, Any] = {"mma": "bf16", "matrices": True, "copies": self.staged} if self.products else {}
        return replace(super().needs, shared_quads=True, lines=self.prefetch > 0, **cores)

    @property
    def shared_bytes(self) -> int:
        """Rows of k before, k now and q; two factors and the output of each row and rank; sines and cosines; the ranks' norms. For
        tensor cores, rows and factors are two terms of 16 bits; rows of k are there twice, and rows have gaps between them."""
        n = self.d_state
        rows = (self.tile * n // 2 if self.staged else 0) + 8 * n + 16 * (n // 2 + 2) + 8 * (n // 2 + (0 if n % 64 else 16))
        numbers = rows + 2 * self.rank * self.headdim if self.products else self.rank * (3 * n + 2 * self.headdim)
        return 4 * (numbers + self.rank * (self.headdim + 1) + 2 * self.angles)

    @property
    def stem(self) -> str:
        kind = f"mamba3{'_tokens' if self.several else ''}_h{self.nheads}p{self.headdim}n{self.d_state}g{self.ngroups}r{self.rank}"
        return f"{kind}_{self.state.value}_{self.how()}{'_staged' if self.staged else ''}"

    def parameters(self) -> list[Param]:
        norms = self.row_norm is not None or self.norm_weight is not None
        return [
            *OPERANDS.pointers(self),
            *([] if self.index is Index.NONE else [Param.i64("slots"), Param.i64("pad_slot_id")]),
            *OPERANDS.stride_params(self),
            *([Param.u32("tokens")] if self.several else []),
            *([Param.u32("columns")] if self.accepted is not Index.NONE else []),
            *([Param.f32("eps")] if norms else []),
            *([Param.f32("A_floor")] if self.rate.raw else []),
        ]

    def constants(self) -> dict[str, Any]:
        return {
            "pooled": self.index is not Index.NONE,
            "split": self.split,
            "final_state": self.update is Update.FINAL,
            "accepted": self.accepted is not Index.NONE,
            "rounded": {self.state.value} if self.philox_rounds else set(),
            "tail": self.headdim % self.tile != 0,
            "vector_state": self.state_loads is Loads.VECTOR,
            "vector_operands": self.operand_loads is Loads.VECTOR,
        }


def space(problem: Mamba3Problem, arch: Arch) -> Iterator[Mamba3Spec]:
    """Every legal variant of a problem, within the axes that are worth a trial."""
    for spec in row_engine.legal(lambda how: spec_of(Mamba3Spec, problem, **how), row_engine.axes(), arch):
        yield spec
        if problem.products and not (staged := replace(spec, staged=True)).violations(arch):
            yield staged


# Measured on an H200, for heads of 64 x 128; docs/lab/mamba3_state_update.md. Fewer warps than a head could have read shared memory less
# often, and spend fewer instructions on addresses; eight rows in flight per team of lanes need too many registers on a full card.
SISO = [
    Rule("few", 4, tile_kib=32),
    Rule("middle", 48, tile_kib=16, ilp=8, pdl=Pdl.TRIGGER_SLOT),
    Rule("bandwidth", float("inf"), tile_kib=8, prefetch=132),
]
IN_REGISTERS = "in registers"  # the rule whose states are not staged: 7.8 us for 8 sequences of 64 heads, staged 9.2
MIMO = [
    Rule("few", 4, tile_kib=16, ilp=8, pdl=Pdl.TRIGGER_SLOT),
    Rule("small", 12, tile_kib=8, pdl=Pdl.TRIGGER_SLOT),
    Rule(IN_REGISTERS, 20, tile_kib=8, pdl=Pdl.TRIGGER_FIRST),
    Rule("middle", 48, tile_kib=8),
    Rule("bandwidth", float("inf"), tile_kib=8, prefetch=132),
]
FEW_F32, SMALL_F32 = Rule("few", 8, tile_kib=32), Rule("small", 16, tile_kib=16)
SISO_F32 = [FEW_F32, Rule("bandwidth", float("inf"), tile_kib=16)]
MIMO_F32 = [FEW_F32, SMALL_F32, Rule("bandwidth", float("inf"), tile_kib=16, pdl=Pdl.TRIGGER_SLOT)]
NOISE = [Rule("few", 4, tile_kib=32), Rule("bandwidth", float("inf"), tile_kib=32, prefetch=132)]  # the generator needs registers
TOKENS = [Rule("tokens", float("inf"), tile_kib=32)]


def _whole(problem: Mamba3Problem, how: dict[str, Any]) -> dict[str, Any]:
    """The same lane map with a block for all rows of a head: in several steps, or for several tokens in one."""
    if problem.products:
        how = how | {"ilp": 2, "threads": 2 * problem.headdim}
    elif problem.several:
        how = how | {"ilp": row_engine.layout(problem)["ilp"]}
    of_warp = 32 // how["lanes"] * how["ilp"]
    if problem.several:
        how = how | {"threads": 32 * -(-problem.headdim // of_warp)}
    at_once = how["threads"] // 32 * of_warp
    return how | {"tile": -(-problem.headdim // at_once) * at_once}


def candidates(problem: Mamba3Problem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, Mamba3Spec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one is generic and applies to every legal problem."""
    siso, mimo = (SISO_F32, MIMO_F32) if problem.state is DType.F32 else (SISO, MIMO)
    rules = TOKENS if problem.several else NOISE if problem.philox_rounds else siso if problem.rank == 1 else mimo
    for rule, how, reason in row_engine.choices(problem, rules, batch, arch, pdl):
        if how is not None:
            how = _whole(problem, how)
            if problem.accepted is not Index.NONE or problem.headdim % how["tile"]:
                how["prefetch"] = 0
            if problem.products and problem.state_loads is Loads.VECTOR:
                how["staged"] = problem.headdim * problem.d_state <= MOST_STAGED and rule != IN_REGISTERS
        yield rule, None if how is None else spec_of(Mamba3Spec, problem, **how), reason
