"""The problem of a linear-attention decode step: choices of recurrence, tokens, states and layouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from ....spec.kernel import LATER, DType, Index, Layout, Loads, Narrow, PoolMode, Ring, Update, must
from ..problem import StepProblem


class Delta(Enum):
    """The first value that the update reads from the state: none, the decayed state, or the state before its decay."""

    NONE = "none"
    DECAYED = "decayed"
    OLD = "old"


class Gate(Enum):
    """How the operand g or gk becomes a log decay."""

    LOG = "log"  # it is one
    SLOPE = "slope"  # -g
    SOFTPLUS = "softplus"  # -exp(A_log) softplus(g + dt_bias)
    BOUNDED = "bounded"  # lower_bound sigmoid(exp(A_log) (g + dt_bias))


class Beta(Enum):
    """How the operand beta becomes the step size."""

    PLAIN = "plain"
    SIGMOID = "sigmoid"
    TWICE_SIGMOID = "twice_sigmoid"


class Tokens(Enum):
    """ONE per sequence, MANY (their number is an argument), or RAGGED: sequence n has cu_seqlens[n + 1] - cu_seqlens[n]."""

    ONE = "one"
    MANY = "many"
    RAGGED = "ragged"


FROZEN_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionProblem(StepProblem):
    """The problem that a call fixes. An absent operand's dtype is None. Batch, tokens, strides and scale are not part of it."""

    dim_k: int
    dim_v: int
    nheads: int  # of v and the state
    key_heads: int  # of q and k
    delta: Delta = Delta.DECAYED
    layout: Layout = Layout.VK
    tokens: Tokens = Tokens.ONE
    state: DType | Narrow = DType.F32
    q: DType = DType.BF16
    k: DType = DType.BF16
    v: DType = DType.BF16
    out: DType = DType.BF16
    g: DType | None = None  # decay per head
    gk: DType | None = None  # decay per key channel
    gv: DType | None = None  # decay per value channel
    gate: Gate = Gate.LOG
    A_log: DType | None = None
    dt_bias: DType | None = None  # per head, or per key channel where gk is
    beta: DType | None = None
    beta_form: Beta = Beta.PLAIN
    beta_rows: bool = False  # one per value channel
    read: DType | None = None  # the key that is read with, if not k
    erase: DType | None = None  # factor per key channel, on values read
    w: DType | None = None  # factor per value channel, on values written
    write: DType | None = None  # low rank: the vector written, p times
    alpha: DType | None = None  # low rank: the vector written is -(read∘alpha)
    bonus: DType | None = field(default=None, metadata=LATER)  # of the token itself: the output is of the state before it
    l2norm: bool = False  # q, k and read are divided by their norms
    index: Index = Index.NONE
    accepted: Index = Index.NONE  # type of num_accepted_tokens, which picks the column of state_indices to start from
    cu_seqlens: Index = Index.NONE
    update: Update = Update.FINAL
    pool: PoolMode = PoolMode.SINGLE
    ring: Ring = Ring.NONE  # COMMIT: k, v, g and beta come from the ring, accepted counts the tokens to replay, and nothing is output
    layers: bool = False  # a commit of several layers: pools, rings and weights have a layer axis in front
    frozen: bool = False  # a call of up to FROZEN_TOKENS that writes no state, and leaves it as it is: tensor cores do the products
    intermediates: bool = False  # the state after each token also goes to a buffer [batch, tokens, …]
    state_loads: Loads = Loads.VECTOR
    operand_loads: Loads = Loads.VECTOR  # of the operands with an element per key channel
    heads_apart: bool = field(default=False, metadata=LATER)  # the state's heads are not consecutive: their stride is an argument
    zero_padding: bool = field(default=True, metadata=LATER)  # the output of padded rows is zero; else it stays as it is
    parents: Index = field(default=Index.NONE, metadata=LATER)  # a draft tree
    kept_index: Index = field(default=Index.NONE, metadata=LATER)  # type of the rows' numbers in the buffer of intermediate states
    philox_rounds: int = field(default=0, metadata=LATER)  # of the noise for rounding states, except f32; 0 = round to nearest
    position: Index = field(default=Index.NONE, metadata=LATER)  # type of ring_position: the tokens that a state lacks
    flush: Index = field(default=Index.NONE, metadata=LATER)  # type of ring_flush
    kept: DType | None = field(default=None, metadata=LATER)  # type of keys and errors in such a ring, if not of k and v

    @property
    def rows(self) -> int:
        return self.dim_v

    @property
    def row_elements(self) -> int:
        return self.dim_k

    @property
    def row_dtype(self) -> DType | Narrow:
        return self.state

    @property
    def lanes_per_row(self) -> int | None:
        return 4 if self.frozen else None

    @property
    def layered(self) -> bool:
        return self.layers

    @property
    def interleaved(self) -> bool:
        return self.layout is Layout.KV

    @property
    def commit(self) -> bool:
        return self.ring is Ring.COMMIT

    @property
    def stores(self) -> bool:
        """Whether a ring receives the inputs of tokens."""
        return self.ring in (Ring.STORE, Ring.READY)

    @property
    def replays(self) -> bool:
        """Whether a state is read through a ring of the tokens that it lacks."""
        return self.ring is Ring.REPLAY

    @property
    def keeps(self) -> bool:
        """Whether a ring receives something of each token."""
        return self.stores or self.replays

    @property
    def kept_k(self) -> DType:
        """The type of keys in a ring."""
        return self.kept or self.k

    @property
    def kept_v(self) -> DType:
        """The type of values or errors in a ring."""
        return self.kept or self.v

    @property
    def kept_g(self) -> DType | None:
        """The type of log decays or raw gates per head in a ring."""
        return self._kept(self.g)

    @property
    def kept_gk(self) -> DType | None:
        """The same per key channel."""
        return self._kept(self.gk)

    @property
    def kept_beta(self) -> DType | None:
        """The type of step sizes or their logits in a ring."""
        return self._kept(self.beta)

    def ring_type(self, name: str) -> DType:
        """The type of an operand's ring."""
        kept: DType = getattr(self, f"kept_{name}")
        return kept

    def _kept(self, operand: DType | None) -> DType | None:
        return DType.F32 if operand and self.ring in (Ring.READY, Ring.REPLAY) else operand

    @property
    def picks(self) -> bool:
        """A commit takes num_accepted_tokens as the number of tokens to replay."""
        return self.accepted is not Index.NONE and not self.commit

    @property
    def batched(self) -> bool:
        """Whether operands of tokens have an axis of sequences."""
        return not self.commit and self.tokens is not Tokens.RAGGED

    @property
    def low_rank(self) -> bool:
        return self.write is not None or self.alpha is not None

    @property
    def rounded(self) -> set[str]:
        """Types that states are rounded to with noise."""
        stored = self.update is not Update.NONE or self.intermediates
        return {self.state.value} if self.philox_rounds and stored and self.state is not DType.F32 else set()

    @property
    def may_freeze(self) -> bool:
        """Whether a call can compute its outputs from the unchanged state, with a few products of 16-bit numbers.

        Not for an f32 state: such a call gives the same bits as calls with single tokens. A shorter state is rounded at every step.
        """
        plain = self.delta is Delta.DECAYED and not (self.gk or self.gv or self.read or self.erase or self.w or self.beta_rows)
        output_only = self.tokens is Tokens.MANY and self.update is Update.NONE and not self.intermediates
        short = self.state is not DType.F32 and self.q is self.k is self.state and self.dim_k % 32 == 0 and self.dim_k <= 256
        vectors = self.layout is Layout.VK and self.state_loads is self.operand_loads is Loads.VECTOR
        return plain and output_only and short and vectors and self.ring is not Ring.READY

    def for_tokens(self, tokens: int) -> LinearAttentionProblem:
        """The same, frozen if it may be and there are few enough tokens."""
        return replace(self, frozen=self.may_freeze and tokens <= FROZEN_TOKENS)

    @property
    def several(self) -> bool:
        """Whether operands have a token axis."""
        return self.tokens is not Tokens.ONE

    @property
    def staged(self) -> bool:
        """Whether a kernel loops over tokens, staged in shared memory."""
        return self.several and not self.frozen

    def faults(self) -> list[str]:
        """Constraints that no variant can meet."""
        read = self.delta is not Delta.NONE
        return [
            *must(self.dim_k >= 1, f"dim_k is {self.dim_k}; expected 1 … 1024"),
            *must(self.dim_k <= 1024, f"dim_k is {self.dim_k}; expected 1 … 1024"),
            *must(self.dim_v >= 1, f"dim_v is {self.dim_v}; expected 1 or more"),
            *must(
                not self.guarded or self.state_loads is self.operand_loads is Loads.ELEMENT,
                f"loads are by vectors with dim_k {self.dim_k} and dim_v {self.dim_v} in layout {self.layout.value}; "
                "expected element for both",
            ),
            *must(
                self.key_heads >= 1 and self.nheads % self.key_heads == 0,
                f"nheads is {self.nheads}; expected a multiple of key_heads {self.key_heads}",
            ),
            *self.slot_faults(),
            *must(
                (self.tokens is Tokens.RAGGED) == (self.cu_seqlens is not Index.NONE),
                f"tokens is {self.tokens.value} and cu_seqlens is {self.cu_seqlens.value}; "
                "expected tokens=ragged if and only if cu_seqlens is set",
            ),
            *must(
                read or not (self.beta or self.read or self.erase or self.w),
                "beta, read, erase or w is set without a delta rule; expected a delta rule",
            ),
            *must(
                not self.low_rank or (self.delta is Delta.OLD and self.read is not None),
                "write or alpha is set; expected delta=old and read with it",
            ),
            *must(not (self.write and self.alpha), "write and alpha are both set; expected one of them"),
            *must(
                not self.low_rank or not (self.beta or self.w or self.erase),
                "write or alpha is set with beta, w or erase; expected none of those",
            ),
            *must(not (self.heads_apart and self.layers), "heads_apart is yes with layers=yes; expected contiguous heads"),
            *must(
                self.gate is Gate.LOG or bool(self.g or self.gk),
                f"gate is {self.gate.value} and neither g nor gk is set; expected one of them",
            ),
            *must(self.gate is Gate.LOG or not (self.g and self.gk), f"gate is {self.gate.value} with g and gk; expected one of them"),
            *must(
                self.gate not in (Gate.LOG, Gate.SLOPE) or not (self.A_log or self.dt_bias),
                f"A_log or dt_bias is set with gate={self.gate.value}; expected a gate that is computed",
            ),
            *must(self.gate is not Gate.SOFTPLUS or self.A_log is not None, "gate is softplus and A_log is none; expected A_log"),
            *must(
                self.ring is Ring.NONE or (self.delta is Delta.DECAYED and not (self.gv or self.read or self.erase or self.w)),
                f"ring is {self.ring.value} with operands that it does not keep; expected a delta rule of k, v, beta and one of g and gk",
            ),
            *must(
                self.replays == (self.position is not Index.NONE) and (self.replays or (self.flush is Index.NONE and not self.kept)),
                f"ring is {self.ring.value}, position is {self.position.value} and flush is {self.flush.value}; "
                "expected a type of position if and only if ring is replay, and flush and kept with it alone",
            ),
            *must(
                not self.replays
                or (
                    self.tokens is Tokens.ONE
                    and self.update is Update.FINAL
                    and not (self.split or self.scaled or self.philox_rounds)
                    and self.layout is Layout.VK
                    and (self.g is None) != (self.gk is None)
                    and not self.beta_rows
                ),
                "ring is replay; expected tokens=one, update=final, pool=single, layout=vk, a state without scales or noise, one of g and "
                "gk, and beta_rows=no with it",
            ),
            *must(
                not self.keeps or self.index is not Index.NONE,
                f"ring is {self.ring.value} and index is none; expected a type of state_indices for index",
            ),
            *must(
                not self.commit
                or (
                    self.accepted is not Index.NONE
                    and self.tokens is Tokens.MANY
                    and self.update is Update.FINAL
                    and not self.intermediates
                ),
                "ring is commit; expected accepted, tokens=many, update=final and intermediates=no with it",
            ),
            *must(not self.layers or self.commit, f"layers is yes with ring={self.ring.value}; expected ring=commit"),
            *must(self.bonus is None or not (read or self.l2norm), "bonus is set with a delta rule or l2norm; expected neither"),
            *must(not (self.low_rank and self.l2norm), "l2norm is yes with write or alpha; expected no: its keys come normalised"),
            *must(
                self.several or not (self.intermediates or self.update is Update.EACH),
                "tokens is one with intermediates or update=each; expected many or ragged",
            ),
            *must(
                self.intermediates or self.parents is Index.NONE,
                "parents is set without intermediate states; expected a buffer of intermediate states",
            ),
            *must(
                self.intermediates or self.kept_index is Index.NONE,
                "the rows of intermediate states have indices, and there are no intermediate states; expected both",
            ),
            *must(not self.frozen or self.may_freeze, "frozen is yes for a call that cannot keep its state; expected no (see may_freeze)"),
            *must(
                not self.scaled or (self.layout is Layout.VK and self.ring is Ring.NONE and not self.intermediates),
                f"state is {self.state.value}; expected layout=vk, ring=none and intermediates=no with it",
            ),
            *must(not self.beta_rows or self.beta is not None, "beta_rows is yes and beta is none; expected beta"),
            *(self._faults_of_noise() if self.philox_rounds else []),
        ]

    def _faults_of_noise(self) -> list[str]:
        """Four neighbours in memory share a counter of the noise, so no vector of a lane may divide them."""
        return [
            *must(
                bool(self.rounded),
                f"philox_rounds is {self.philox_rounds} and no written state is rounded; expected 0, or a state shorter than f32",
            ),
            *must(not self.commit, f"philox_rounds is {self.philox_rounds} with ring=commit; expected 0: a commit rounds to nearest"),
            *must(
                self.interleaved or self.dim_k % 4 == 0,
                f"dim_k is {self.dim_k} with philox_rounds {self.philox_rounds}; expected a multiple of 4",
            ),
            *must(
                not self.interleaved or (self.dim_v % 4 == 0 and self.dim_k % 16 == 0),
                f"heads are {self.dim_k} x {self.dim_v}, keys first, with philox_rounds {self.philox_rounds}; "
                "expected a multiple of 16 and a multiple of 4",
            ),
        ]
