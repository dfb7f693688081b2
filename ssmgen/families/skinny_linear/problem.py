"""The problem of skinny_linear: out = x W^T * scale + bias + residual for 1 to 16 rows of x, which may be normed before."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...spec.kernel import LATER, DType, Loads, Narrow, Problem, must
from .operands import MOST, OPERANDS

OPERATOR = "skinny_linear"
ROWS = (8, 16)  # of x, at most, that kernels are made for
MAX_K = 1 << 17
NARROW = (Narrow.I8, Narrow.E4M3)  # types of weights with scales


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyProblem(Problem):
    """The problem that a call fixes. The rows of its weights, N, and the strides are not part of it."""

    k: int  # elements of a row
    x: DType = DType.BF16  # and of weights unless they are narrow
    out: DType = DType.BF16
    bias: DType | None = None
    weights: int = 1
    rows: int = ROWS[0]  # of x, at most
    loads: Loads = Loads.VECTOR  # of x: 16 bytes at once
    narrow: Narrow | None = field(default=None, metadata=LATER)  # of weights of 8 bits, which have scales
    scale: DType | None = field(default=None, metadata=LATER)
    residual: DType | None = field(default=None, metadata=LATER)
    gated: bool = field(default=False, metadata=LATER)  # one output: silu of the first product, times the second one
    norm: DType | None = field(default=None, metadata=LATER)  # of the weight of x's norm
    relu2: bool = field(default=False, metadata=LATER)  # each output is max(y, 0)^2 of its product y

    @property
    def weight(self) -> DType | Narrow:
        """The type of the weights."""
        return self.narrow or self.x

    @property
    def step(self) -> int:
        """K is a multiple of it: 8 elements of x and 16 bytes of a weight."""
        return 16 if self.narrow else 8

    @property
    def second(self) -> bool:
        return self.weights > 1

    @property
    def second_out(self) -> bool:
        return self.second and not self.gated

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
        step, narrow, scale = self.step, self.narrow, self.scale
        types = " or ".join(kind.value for kind in NARROW)
        return [
            *must(step <= self.k <= MAX_K and self.k % step == 0, f"k is {self.k}; expected {step} … {MAX_K} in steps of {step}"),
            *must(narrow in (None, *NARROW), f"narrow is {narrow.value if narrow else narrow}; expected none, {types}"),
            *must(not narrow or self.x is not DType.F32, "x is f32 and weights have 8 bits; expected x in bf16 or f16"),
            *must(not narrow or bool(scale), "narrow is given and scale is not; expected both, for weights of 8 bits"),
            *must(
                scale in (None, self.x, DType.F32), f"scale is {scale.value if scale else scale}; expected f32 or {self.x.value}, x's type"
            ),
            *must(1 <= self.weights <= MOST, f"weights is {self.weights}; expected 1 … {MOST}"),
            *must(not self.gated or self.weights == 2, f"weights is {self.weights} and gated is yes; expected 2, gate and up"),
            *must(not (self.gated and self.relu2), "gated and relu2 are yes; expected at most one activation"),
            *must(self.rows in ROWS, f"rows is {self.rows}; expected {' or '.join(map(str, ROWS))}"),
            *must(self.out in (self.x, DType.F32), f"out is {self.out.value}; expected x's type, {self.x.value}, or f32"),
        ]
