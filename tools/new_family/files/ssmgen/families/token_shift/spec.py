"""token_shift: mixes each channel of a token with the same channel of the previous token, as RWKV does before its projections.

A thread owns `vec` neighbouring channels of one row. Bytes per row: 4 * dim * sizeof(x); mix stays in L2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ...spec.kernel import Arch, DType, Index, KernelSpec, Loads, Needs, Param, Pdl, Problem, must
from ...spec.operands import Operand, Types, table
from ...spec.variants import spec_of, trials

OPERATOR = "token_shift"
# The order of kernel parameters, strides, checks, rules for DTensors and torch's schema come from here.
OPERANDS = table(
    Operand("state", "slot dim", written=True, field="x", strides="slot:64"),
    Operand("x", "batch dim", strides="batch:64"),
    Operand("mix", "dim"),
    Operand("state_indices", "batch", Types.INDEX, optional=True, field="index", strides="batch:64"),
    Operand("out", "like x", written=True, field="x"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShiftProblem(Problem):
    """The problem that a call fixes."""

    dim: int
    x: DType  # of state and out too
    mix: DType
    index: Index
    loads: Loads  # of all operands: vectors where they are aligned

    def faults(self) -> list[str]:
        """Constraints that no variant can meet."""
        return must(1 <= self.dim < 2**24, f"dim is {self.dim}; expected 1 … 2^24 - 1")


@dataclass(frozen=True, kw_only=True)
class TokenShiftSpec(KernelSpec, TokenShiftProblem):
    """A problem, and how one variant computes it. No choice here changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "token_shift/token_shift.cu.j2"
    table: ClassVar[Any] = OPERANDS

    vec: int  # channels per thread
    threads: int = 128
    min_blocks: int = 0  # blocks per SM that ptxas must leave registers for; 0 = its own choice
    pdl: Pdl = Pdl.OFF

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def threads_per_block(self) -> int:
        return self.threads

    @property
    def blocks(self) -> int:
        """How many share a row."""
        return -(-self.dim // (self.vec * self.threads))

    @property
    def stem(self) -> str:
        return f"token_shift_d{self.dim}_{self.x.value}_v{self.vec}x{self.threads}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def violations(self, arch: Arch) -> list[str]:
        vector = self.loads is Loads.VECTOR
        return [
            *self.faults(),
            *must(self.threads % 32 == 0 and 32 <= self.threads <= 1024, f"threads is {self.threads}; expected 32 … 1024 in steps of 32"),
            *must(vector or self.vec == 1, f"vec is {self.vec} for operands that are not aligned; expected 1"),
            *must(not vector or self.vec * self.x.size in (4, 8, 16), f"vec is {self.vec} of {self.x.value}; expected 4, 8 or 16 bytes"),
            *must(self.dim % self.vec == 0, f"dim is {self.dim}; expected a multiple of vec {self.vec}"),
            *self.arch_violations(arch),
        ]

    def parameters(self) -> list[Param]:
        """Pointers come first."""
        slots = [Param.i64("slots"), Param.i64("pad_slot_id")] if self.index is not Index.NONE else []
        return [*OPERANDS.pointers(self), *slots, *OPERANDS.stride_params(self)]

    def constants(self) -> dict[str, Any]:
        return {"vector": self.loads is Loads.VECTOR, "pooled": self.index is not Index.NONE}


def _widest(problem: TokenShiftProblem) -> int:
    most = 16 // problem.x.size
    return min(most, problem.dim & -problem.dim) if problem.loads is Loads.VECTOR else 1


def space(problem: TokenShiftProblem, arch: Arch) -> Iterator[TokenShiftSpec]:
    """Every legal variant of a problem within the axes worth trying."""
    vec = dict.fromkeys((4 // problem.x.size, _widest(problem)))
    return trials(TokenShiftSpec, problem, arch, {"vec": vec, "threads": (64, 128, 256), "pdl": Pdl})


def candidates(problem: TokenShiftProblem, batch: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, TokenShiftSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one applies to every legal problem."""
    how: dict[str, Any] = {"vec": _widest(problem), "pdl": Pdl.TRIGGER_LOADED if pdl else Pdl.OFF}
    if batch > FEW:
        yield "few-rows", None, f"batch {batch} is above {FEW}"
    else:
        yield "few-rows", spec_of(TokenShiftSpec, problem, threads=64, **how), ""
    yield "generic", spec_of(TokenShiftSpec, problem, threads=256, **how), ""


FEW = 16  # rows, for which smaller blocks reach more SMs. Say here where a number like this was measured
