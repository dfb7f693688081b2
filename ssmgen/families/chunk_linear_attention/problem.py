"""The problem of linear attention over prompts with a decay per key channel; and the layout of its chunks' images (the workspace)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ...engine.chunks.problem import AttentionStates, Chunked, chunks_of
from ...engine.recurrences.attention.problem import Beta, Gate
from ...spec.kernel import DType, Index, Loads, Problem, must

OPERATOR = "chunk_linear_attention"
SIZE, MAX_SIZE = "heads", 2**31 - 1  # the rules compare heads, not sequences, so that bits do not depend on the number of sequences

ROWS = 64  # of a chunk's matrices
BLOCK = 64  # columns of one that lie together, 128 bytes a row
BLOCK_BYTES = ROWS * BLOCK * 2
PANEL = 16  # adjacent columns of T or P
PANELS = ROWS // PANEL
SQUARE_BYTES = PANEL * PANEL * 2  # of 16 rows of one


class Rule(Enum):
    """The read of a token's update: nothing, the decayed state, or the state before its decay."""

    PLAIN = "plain"  # S <- S D + v k^T
    DELTA = "delta"  # S <- S D + (v - S D e) w^T
    OLD = "old"  # S <- S D + (v - S e) w^T
    LOW_RANK = "low_rank"  # S <- S D + (S a) b^T + v k^T: two rows per token, v's row in the first half of a chunk

    @property
    def reads(self) -> bool:
        return self is not Rule.PLAIN

    @property
    def tokens(self) -> int:
        """Tokens per chunk; part of the result's bits."""
        return ROWS // 2 if self is Rule.LOW_RANK else ROWS

    @property
    def weighs(self) -> bool:
        """Whether steps and norms are in T, not in the written keys; then T's blocks on the diagonal have two terms."""
        return self in (Rule.DELTA, Rule.OLD)

    @property
    def silent(self) -> int:
        """The first rows of a chunk, which read nothing and produce no output: in E, Q, T and P they are zero, and are not stored."""
        return ROWS - self.tokens

    @property
    def panel_bytes(self) -> tuple[int, ...]:
        """Bytes of T's or P's panels. A panel begins with the row where its first column crosses the diagonal: rows above are zero."""
        return tuple((ROWS - max(self.silent, PANEL * c)) * PANEL * 2 for c in range(PANELS))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProblem(Problem, Chunked):
    """The fields that images of chunks depend on: keys and gates. Heads, tokens, strides, scale and lower bound are not fixed.

    An operand's dtype is None if the operand is missing. The state decays by g, per head, or by gk, per key channel, or by neither.
    """

    head_k: int  # key channels
    rule: Rule = Rule.DELTA
    x: DType = DType.BF16  # of q, k, v, read, write and out
    g: DType | None = None
    gk: DType | None = None
    gate: Gate = Gate.LOG
    A_log: DType | None = None
    dt_bias: DType | None = None  # per head with g, per key channel with gk
    beta: DType | None = None
    beta_form: Beta = Beta.PLAIN
    read: bool = False  # there is a separate reading key; without, k reads
    write: bool = False  # low rank: there is a vector that is written
    erase: DType | None = None  # factor, per key channel, of the reading key
    alpha: DType | None = None  # low rank: the vector written is -(read∘alpha)
    l2norm: bool = False  # q, k and read are divided by their norms
    cu_seqlens: Index = Index.NONE  # type of it: tokens are packed sequences
    copy: int = 16  # bytes of q, k, v, read, write and out that are contiguous and aligned
    loads: Loads = Loads.VECTOR  # of gk, erase, alpha and a dt_bias per channel: eight neighbours, at once if they are aligned

    @property
    def decay(self) -> DType | None:
        """The dtype of the operand that gives the state's decay."""
        return self.gk or self.g

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.rule.tokens

    @property
    def image(self) -> Image:
        return image_of(self.head_k, self.rule)

    def faults(self) -> list[str]:
        """Reasons why no variant can serve this problem."""
        low_rank, raw = self.rule is Rule.LOW_RANK, self.gate in (Gate.SOFTPLUS, Gate.BOUNDED)
        return [
            *must(self.head_k % 16 == 0 and 16 <= self.head_k <= 256, f"K is {self.head_k}; expected 16 … 256 in steps of 16"),
            *must(self.x is not DType.F32, "q, k and v are f32; expected bf16 or f16, for tensor cores"),
            *must(
                self.copy in (4, 8, 16),
                "the tokens or heads of q, k, v or out begin at an odd element; expected multiples of 4 bytes. Pass contiguous tensors.",
            ),
            *must(not (self.g and self.gk), "g and gk are both set; expected one of them"),
            *must(
                self.gate is Gate.LOG or self.decay is not None,
                f"gate is {self.gate.value} and neither g nor gk is set; expected one of them",
            ),
            *must(self.gate is not Gate.SOFTPLUS or self.A_log is not None, "gate is softplus and A_log is none; expected A_log"),
            *must(
                raw or not (self.A_log or self.dt_bias),
                f"A_log or dt_bias is set with gate={self.gate.value}; expected gate=softplus or bounded",
            ),
            *must(
                self.rule.reads or not (self.beta or self.read or self.erase),
                "beta, read or erase is set with rule=plain; expected a delta rule",
            ),
            *must(
                low_rank == (self.write or self.alpha is not None),
                f"rule is {self.rule.value}; expected write or alpha if and only if it is low_rank",
            ),
            *must(not low_rank or self.read, "rule is low_rank and read is no; expected yes"),
            *must(not (self.write and self.alpha), "write and alpha are both set; expected one of them"),
            *must(not low_rank or not (self.beta or self.erase), "rule is low_rank with beta or erase; expected neither"),
            *must(not (low_rank and self.l2norm), "rule is low_rank with l2norm=yes; expected no: its keys come normalised"),
        ]


@dataclass(frozen=True, kw_only=True)
class LinearPromptProblem(AttentionStates, ImageProblem):
    """The fields that a call fixes: the images' fields, and states."""

    @property
    def cuts(self) -> bool:
        return self.rule.weighs

    def faults(self) -> list[str]:
        return [
            *super().faults(),
            *must(
                self.rule.weighs or not self.divided,
                f"segments is {self.segments} with rule={self.rule.value}; expected 1, or rule=delta or old",
            ),
        ]


class Image(NamedTuple):
    """Start of each part of a chunk and head's image, and its size, in bytes. E and T are present if the rule reads; rest, second terms of
    the four blocks on T's diagonal, if it weighs."""

    e: int
    q: int
    w: int
    t: int
    rest: int
    p: int
    decay: int
    bytes: int


def image_of(head_k: int, rule: Rule) -> Image:
    blocks, panels, reads = -(-head_k // BLOCK), sum(rule.panel_bytes), int(rule.reads)
    q = reads * blocks * rule.tokens * BLOCK * 2
    w = q + blocks * rule.tokens * BLOCK * 2
    t = w + blocks * BLOCK_BYTES
    rest = t + reads * panels
    p = rest + rule.weighs * PANELS * SQUARE_BYTES
    decay = p + panels
    return Image(0, q, w, t, rest, p, decay, -(-(decay + 4 * head_k) // 128) * 128)


def workspace_bytes(tokens: int, sequences: int, heads: int, head_k: int, rule: Rule) -> int:
    """Bytes of the images of all chunks: the image of number n and head h begins at (n heads + h) times an image's bytes."""
    return chunks_of(tokens, sequences, rule.tokens) * heads * image_of(head_k, rule).bytes
