"""The problem of a delta rule over prompts: dtypes, gates, states; and the layout of its chunks' images (the workspace)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ...engine.chunks.problem import CHUNK, AttentionStates, Chunked, chunks_of
from ...engine.recurrences.attention.problem import Beta
from ...spec.kernel import DType, Index, Problem, must

OPERATOR = "chunk_delta_rule"
SIZE, MAX_SIZE = "heads", 2**31 - 1  # the rules compare heads, not sequences, so that bits do not depend on the number of sequences

NUMBER = 2  # bytes of an element of T and P
PANEL = 16  # adjacent columns of T or P
PANELS = CHUNK // PANEL
# A panel begins with the row where its first column crosses the diagonal: the rows above are zero, and are not stored.
PANEL_BYTES = tuple((CHUNK - PANEL * c) * PANEL * NUMBER for c in range(PANELS))
COEFFICIENTS = 3 * CHUNK + 4  # f32: c_x, c_u and c_o of each token, and the chunk's decay four times
IMAGE = 11136  # bytes of a chunk and head: T, P, coefficients, and padding to a multiple of 128
T_AT, P_AT, COEFFICIENTS_AT = 0, sum(PANEL_BYTES), 2 * sum(PANEL_BYTES)


class Gate(Enum):
    """How the operand g gives the decay of a token's state."""

    NONE = "none"  # no g: a plain delta rule
    LOG = "log"  # exp(g)
    LINEAR = "linear"  # g, 0 … 1
    RAW = "raw"  # exp(-exp(A_log) softplus(g + dt_bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProblem(Problem, Chunked):
    """The fields that the images of chunks depend on: q, k and gates. Heads, tokens, strides and scale are not fixed."""

    head_k: int  # channels of q and k
    x: DType = DType.BF16  # of q, k, v and out
    g: DType | None = None
    gate: Gate = Gate.NONE
    A_log: DType | None = None
    dt_bias: DType | None = None
    beta: DType = DType.BF16
    beta_form: Beta = Beta.PLAIN
    l2norm: bool = False  # q and k are divided by their norms
    cu_seqlens: Index = Index.NONE  # type of it: tokens are packed sequences
    copy: int = 16  # bytes of q, k, v and out that are contiguous and aligned

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return CHUNK

    def faults(self) -> list[str]:
        """Reasons why no variant can serve this problem."""
        return [
            *must(self.head_k % 16 == 0 and 16 <= self.head_k <= 256, f"K is {self.head_k}; expected 16 … 256 in steps of 16"),
            *must(self.x is not DType.F32, "q, k and v are f32; expected bf16 or f16, for tensor cores"),
            *must(
                self.copy in (4, 8, 16),
                "the tokens or heads of q, k, v or out begin at an odd element; expected multiples of 4 bytes. Pass contiguous tensors.",
            ),
            *must(
                (self.g is None) == (self.gate is Gate.NONE),
                f"g is {self.g.value if self.g else 'none'} and gate is {self.gate.value}; expected both or neither",
            ),
            *must(
                (self.A_log is None) == (self.gate is not Gate.RAW),
                f"A_log is {self.A_log.value if self.A_log else 'none'} with gate={self.gate.value}; "
                "expected A_log if and only if gate is raw",
            ),
            *must(self.dt_bias is None or self.gate is Gate.RAW, f"dt_bias is set with gate={self.gate.value}; expected gate=raw"),
        ]


@dataclass(frozen=True, kw_only=True)
class DeltaProblem(AttentionStates, ChunkProblem):
    """The fields that a call fixes: the images' fields, and states."""


def image_bytes(tokens: int, sequences: int, heads: int) -> int:
    """Bytes of the images of all chunks: the image of number n and head h begins at (n heads + h) IMAGE."""
    return chunks_of(tokens, sequences, CHUNK) * heads * IMAGE
