"""The problem of skinny_linear: out = x W^T + bias for 1 to 16 rows of x."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.kernel import DType, Loads, Problem, must
from .operands import MOST, OPERANDS

OPERATOR = "skinny_linear"
ROWS = (8, 16)  # of x, at most, that kernels are made for
MAX_K = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyProblem(Problem):
    """The problem that a call fixes. The rows of its weights, N, and the strides are not part of it."""

    k: int  # elements of a row
    x: DType = DType.BF16  # and of the weights
    out: DType = DType.BF16
    bias: DType | None = None
    weights: int = 1
    rows: int = ROWS[0]  # of x, at most
    loads: Loads = Loads.VECTOR  # of x: 16 bytes at once

    @property
    def second(self) -> bool:
        return self.weights > 1

    @property
    def third(self) -> bool:
        return self.weights > 2

    @property
    def fourth(self) -> bool:
        return self.weights > 3

    def names(self, name: str) -> list[str]:
        """The operands of a kind, weight, bias or out, that a call has."""
        return [row.name for row in OPERANDS if row.name.split("_")[0] == name and row.is_in(self)]

    def faults(self) -> list[str]:
        """Constraints that no variant can meet."""
        return [
            *must(8 <= self.k <= MAX_K and self.k % 8 == 0, f"k is {self.k}; expected 8 … {MAX_K} in steps of 8"),
            *must(1 <= self.weights <= MOST, f"weights is {self.weights}; expected 1 … {MOST}"),
            *must(self.rows in ROWS, f"rows is {self.rows}; expected {' or '.join(map(str, ROWS))}"),
            *must(self.out in (self.x, DType.F32), f"out is {self.out.value}; expected x's type, {self.x.value}, or f32"),
        ]
