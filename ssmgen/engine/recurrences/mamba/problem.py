"""The problem of a Mamba decode step: shapes and dtypes, one token or several, and the states that are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....spec.kernel import LATER, DType, Index, Loads, Narrow, PoolMode, Update, must
from ..problem import StepProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class SsuProblem(StepProblem):
    """The problem that a call fixes: shapes, dtypes and the operands it has. The numbers of sequences and of tokens are not part of it."""

    d_state: int
    headdim: int
    nheads: int = 1
    ngroups: int = 1
    state: DType | Narrow = DType.F32
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
    philox_rounds: int = field(default=0, metadata=LATER)  # of the noise for rounding states, except f32; 0 = round to nearest
    several: bool = field(default=False, metadata=LATER)  # operands have a tokens axis; all that follows needs it
    cu_seqlens: Index = field(default=Index.NONE, metadata=LATER)  # sequences of different lengths, packed
    accepted: Index = field(default=Index.NONE, metadata=LATER)  # type of num_accepted_tokens, which picks the column of state_indices
    update: Update = field(default=Update.FINAL, metadata=LATER)
    intermediate_states: DType | Narrow | None = field(default=None, metadata=LATER)  # after each token, in a buffer [rows, tokens, …]
    intermediate_indices: Index = field(default=Index.NONE, metadata=LATER)  # type of the rows' numbers in that buffer
    parents: Index = field(default=Index.NONE, metadata=LATER)  # a draft tree
    zero_padding: bool = field(default=True, metadata=LATER)  # the output of padded rows is zero; else it stays as it is

    @property
    def row_elements(self) -> int:
        return self.d_state

    @property
    def rows(self) -> int:
        return self.headdim

    @property
    def row_dtype(self) -> DType | Narrow:
        return self.state

    @property
    def guarded(self) -> bool:
        """Rows of 2 are not guarded in the kernel for a single token either, unless 4 elements make a word."""
        return self.d_state % 4 != 0 and (self.d_state != 2 or self.several or bool(self.narrow))

    @property
    def intermediates(self) -> bool:
        return self.intermediate_states is not None

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens is not Index.NONE

    @property
    def kept_scaled(self) -> bool:
        """Whether the rows of intermediate states have scales."""
        return isinstance(self.intermediate_states, Narrow)

    @property
    def narrow(self) -> set[Narrow]:
        """Types of the states with scales."""
        return {t for t in (self.state, self.intermediate_states) if isinstance(t, Narrow)}

    @property
    def rounded(self) -> set[str]:
        """Types that states are rounded to with noise."""
        stored = [self.intermediate_states, *([] if self.update is Update.NONE else [self.state])]
        return {t.value for t in stored if t not in (None, DType.F32)} if self.philox_rounds else set()

    def faults(self) -> list[str]:
        """Constraints that no variant can meet."""
        return [
            *must(self.d_state >= 1, f"d_state is {self.d_state}; expected 1 … 1024"),
            *must(self.d_state <= 1024, f"d_state is {self.d_state}; expected 1 … 1024"),
            *must(
                not self.guarded or self.state_loads is self.operand_loads is Loads.ELEMENT,
                f"loads are by vectors with d_state {self.d_state}; expected state_loads=element and operand_loads=element",
            ),
            *must(self.headdim >= 1, f"headdim is {self.headdim}; expected 1 or more"),
            *must(self.nheads % self.ngroups == 0, f"nheads is {self.nheads}; expected a multiple of ngroups {self.ngroups}"),
            *self.slot_faults(),
            *must(
                not self.philox_rounds or self.d_state % 4 == 0,
                f"d_state is {self.d_state} with philox_rounds {self.philox_rounds}; expected a multiple of 4",
            ),
            *must(
                not self.philox_rounds or bool(self.rounded),
                f"philox_rounds is {self.philox_rounds} and no written state is rounded; expected 0, or a state shorter than f32",
            ),
            *(self._faults_of_tokens() if self.several else self._faults_of_one()),
        ]

    def _faults_of_one(self) -> list[str]:
        bare = self.update is Update.FINAL and not (self.intermediates or self.ragged)
        indices = {self.accepted, self.intermediate_indices, self.parents}
        return must(
            bare and indices == {Index.NONE},
            "several is no with update, accepted, cu_seqlens, parents or intermediate states set; expected several=yes",
        )

    def _faults_of_tokens(self) -> list[str]:
        return [
            *must(
                self.tied,
                "A, dt or dt_bias differs within a head; expected one value per head for several tokens. "
                "Pass [heads], or views with stride 0.",
            ),
            *must(
                self.intermediates or self.intermediate_indices is Index.NONE,
                "the rows of intermediate states have indices, and there are no intermediate states; expected both",
            ),
            *must(
                self.intermediates or self.parents is Index.NONE,
                "parents is set without intermediate states; expected a buffer of intermediate states",
            ),
        ]
