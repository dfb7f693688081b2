"""The problem of a Mamba-3 decode step: shapes, dtypes, and the activations that the kernel applies."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ....spec.kernel import LATER, DType, Index, Loads, PoolMode, Update, must
from ..problem import StepProblem

MOST_RANK = 8
MOST_ROWS = MOST_ELEMENTS = 128  # of a head, for products: four lanes hold two rows in registers


class Rate(Enum):
    """The form of A: a number a for A = -(1 + a) if a >= 0, else -1 / (1 - a); a for A = -softplus(a); A itself; or A dt."""

    HEAVY = "heavy"
    SOFTPLUS = "softplus"
    READY = "ready"
    LOG_DECAY = "log_decay"

    @property
    def raw(self) -> bool:
        """Whether the kernel applies an activation and the floor."""
        return self in (Rate.HEAVY, Rate.SOFTPLUS)


class Rotary(Enum):
    """The elements that an angle rotates: neighbours (2i, 2i + 1), or (i, i + d_state / 2)."""

    PAIRS = "pairs"
    HALVES = "halves"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba3Problem(StepProblem):
    """The problem that a call fixes. The numbers of sequences and of tokens are not part of it."""

    d_state: int
    headdim: int
    nheads: int
    ngroups: int = 1
    rank: int = 1
    angles: int = 0  # of a head; 0: rows of B and C do not rotate
    rotary: Rotary = Rotary.PAIRS
    rate: Rate = Rate.HEAVY
    dt_softplus: bool = True
    trap_sigmoid: bool = True
    state: DType = DType.F32
    k_state: DType = DType.BF16
    v_state: DType = DType.BF16
    x: DType = DType.BF16
    B: DType = DType.BF16  # of C too
    dt: DType = DType.BF16
    A: DType = DType.BF16
    trap: DType = DType.BF16
    angle: DType | None = None
    D: DType | None = None
    z: DType | None = None
    dt_bias: DType | None = None
    row_norm: DType | None = None  # weights of the norms of B and C
    row_bias: DType | None = None  # of B and C
    mimo: DType | None = None  # mimo_x, mimo_z and mimo_o
    norm_weight: DType | None = None
    out: DType = DType.BF16
    by_rank: bool = False  # one output for each rank; else their sum
    index: Index = Index.NONE
    pool: PoolMode = PoolMode.SINGLE
    state_loads: Loads = Loads.VECTOR
    operand_loads: Loads = Loads.VECTOR  # VECTOR: rows of B, C, k_state are aligned, and nothing has strides but of slots, batch and tokens
    philox_rounds: int = field(default=0, metadata=LATER)  # of the noise for rounding the state; 0 = round to nearest
    several: bool = field(default=False, metadata=LATER)  # operands have a tokens axis
    accepted: Index = field(default=Index.NONE, metadata=LATER)  # type of num_accepted_tokens, which picks the column of state_indices
    update: Update = field(default=Update.FINAL, metadata=LATER)
    zero_padding: bool = field(default=True, metadata=LATER)  # the output of padded rows is zero; else it stays as it is

    @property
    def rows(self) -> int:
        return self.headdim

    @property
    def row_elements(self) -> int:
        return self.d_state

    @property
    def row_dtype(self) -> DType:
        return self.state

    @property
    def products(self) -> bool:
        """Whether tensor cores multiply: for one token, four ranks and a bf16 state, whose rows of 32 columns are operands as they are."""
        rows, elements = self.headdim, self.d_state
        fits = rows % 16 == 0 and rows <= MOST_ROWS and elements % 32 == 0 and elements <= MOST_ELEMENTS
        return fits and self.rank == 4 and self.state is DType.BF16 and not self.several

    @property
    def lanes_per_row(self) -> int | None:
        return 4 if self.products else None  # as the tensor cores' operands lie

    @property
    def rotates(self) -> bool:
        return self.angles > 0

    def faults(self) -> list[str]:
        """Constraints that no variant can meet."""
        n, most = self.d_state, self.d_state // 2
        return [
            *must(n % 4 == 0 and 4 <= n <= 1024, f"d_state is {n}; expected a multiple of 4 from 4 to 1024"),
            *must(1 <= self.headdim <= 1024, f"headdim is {self.headdim}; expected 1 … 1024"),
            *must(1 <= self.rank <= MOST_RANK, f"rank is {self.rank}; expected 1 … {MOST_RANK}"),
            *must(0 <= self.angles <= most, f"angles is {self.angles}; expected 0 … {most}, half of d_state"),
            *must(self.rotates == (self.angle is not None), f"angles is {self.angles} and angle is {self.angle}; expected both or neither"),
            *must(self.nheads % self.ngroups == 0, f"nheads is {self.nheads}; expected a multiple of ngroups, {self.ngroups}"),
            *must(self.rank == 1 or self.mimo is not None, f"rank is {self.rank} and mimo is none; expected mimo_x for several ranks"),
            *self.slot_faults(),
            *must(
                not self.philox_rounds or self.state is not DType.F32,
                f"philox_rounds is {self.philox_rounds} and state is {self.state.value}; expected f16 or bf16",
            ),
            *must(self.update is not Update.NONE, "update is none; expected final or each"),
            *must(
                self.several or not (self.each or self.picks),
                f"update is {self.update.value} and accepted is {self.accepted.value} with one token; expected final and none",
            ),
        ]
