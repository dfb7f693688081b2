"""chunk_linear_attention: linear attentions whose state decays per key channel, over whole sequences, by two kernels or four.

A chunk has 64 rows: a token's each, or of the low-rank form two for each of 32 tokens, of which the first half writes v and the second one
what is read. With gamma the running sum of log2 decays of a key channel, e what is read with and c w what is written with, of which c is a
number, a chunk that begins in S gives

    E_i = e_i 2^gamma_i        Q_i = scale q_i 2^gamma_i        W_j = w_j 2^(gamma_last - gamma_j)        decay = 2^gamma_last
    A_ij = c_j times the sum over channels of e_i w_j 2^(gamma_i - gamma_j), j < i        T = diag(c) (I + A)^-1
    P_ij = scale times that of q_i w_j 2^(gamma_i - gamma_j), j <= i
    X = v - E S^T        u = T X        o = Q S^T + P u        S <- S diag(decay) + u^T W

What reads the state before its decay has gamma of the token before in E and A. beta and what a key's norm is beside a power of two are in
c: so W is k itself where nothing decays, and T takes their rounding, whose blocks on the diagonal have a second term, as u has in P u.
Where a rule has neither (plain, low rank), c is 1. The first kernel makes all but X, u and o, of all chunks at once, and leaves for each
chunk and head an *image*; the last one walks a sequence's chunks with a head's S, some of its rows, in f32 in registers. Two more, between
them, serve sequences that are cut into segments (segments.py).
Bytes per token and head: 4 V of v and out, 2 x (6 K + 192 + K / 16) of images, and q, k and gates once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.chunks.kernels import ChunkKernel
from ...spec.kernel import Pdl
from ...spec.operands import Table
from .operands import KERNELS
from .problem import BLOCK, BLOCK_BYTES, PANELS, ROWS, ImageProblem, Rule


@dataclass(frozen=True, kw_only=True)
class LinearSpec(ChunkKernel, ImageProblem):
    """How one of the two kernels computes its part."""

    word: ClassVar[str] = "linear"
    table: ClassVar[Table] = KERNELS

    pdl: Pdl = Pdl.OFF

    @property
    def sums(self) -> bool:
        """Whether it makes N and M of segments, and no outputs."""
        return False

    def constants(self) -> dict[str, Any]:
        return {
            "rows": ROWS,
            "chunk": self.rule.tokens,
            "reads": self.rule.reads,
            "low_rank": self.rule is Rule.LOW_RANK,
            "block": BLOCK,
            "block_bytes": BLOCK_BYTES,
            "image": self.image,
            "panels": PANELS,
            "panel_bytes": self.rule.panel_bytes,
            "weighs": self.rule.weighs,
        }
