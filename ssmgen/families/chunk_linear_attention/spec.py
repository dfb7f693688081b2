"""chunk_linear_attention: linear attentions whose state decays per key channel, over whole sequences, by two kernels or four.

A chunk has 64 rows: one per token, or in the low-rank form two for each of 32 tokens: the first half writes v, the second half the value
that was read. gamma is the running sum of log2 decays of a key channel, e the reading key, and c w the writing key, with a number c. A
chunk that begins in S computes

    E_i = e_i 2^gamma_i        Q_i = scale q_i 2^gamma_i        W_j = w_j 2^(gamma_last - gamma_j)        decay = 2^gamma_last
    A_ij = c_j times the sum over channels of e_i w_j 2^(gamma_i - gamma_j), j < i        T = diag(c) (I + A)^-1
    P_ij = scale times the same sum of q_i w_j 2^(gamma_i - gamma_j), j <= i
    X = v - E S^T        u = T X        o = Q S^T + P u        S <- S diag(decay) + u^T W

Rules that read the state before its decay use the previous token's gamma in E and A. c holds beta and a key's norm up to a power of two.
W is therefore k itself if nothing decays, and T takes the rounding of c: its blocks on the diagonal have a second term, as u has in P u.
Rules without both (plain, low rank) have c = 1. The first kernel computes all except X, u and o, for all chunks at once, and stores an
*image* in the workspace for each chunk and head. The last one scans a sequence's chunks with some rows of a head's S in f32 in registers.
Two more kernels, between them, serve sequences that are cut into segments (engine/chunks/segments.py).
Bytes per token and head: 4 V of v and out, 2 x (6 K + 192 + K / 16) of images, and q, k and gates once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.chunks.kernels import ChunkKernel
from ...engine.chunks.segments import Join, asked
from ...spec.kernel import Pdl
from .operands import KERNELS
from .problem import BLOCK, BLOCK_BYTES, PANELS, ROWS, ImageProblem, LinearPromptProblem, Rule, workspace_bytes


@dataclass(frozen=True, kw_only=True)
class LinearSpec(ChunkKernel, ImageProblem):
    """How one of the two kernels computes its part."""

    word: ClassVar[str] = "linear"
    table: ClassVar[Any] = KERNELS

    pdl: Pdl = Pdl.OFF

    @property
    def sums(self) -> bool:
        """Whether it computes N and M of segments, and no outputs."""
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


FEWEST = 3  # least segments after the first, by the rule: with two, KDA's 8192 tokens of 32 heads took 325 us, and 316 us as one


def cut_by(rule: Rule, segments: int | None, heads: int, head_v: int, longest: int) -> dict[str, Any]:
    """The fields of a problem that fix how its sequences of at most `longest` tokens are cut; segments: the call's, or None for the
    rule."""
    return asked(segments, heads, head_v, longest, FEWEST) if rule.weighs else {}


def workspace_for(tokens: int, sequences: int, heads: int, head_k: int, head_v: int, rule: Rule, segments: int | None, longest: int) -> int:
    """Bytes that a call needs: images, then the results of segments."""
    cut = LinearPromptProblem(head_k=head_k, head_v=head_v, rule=rule, **cut_by(rule, segments, heads, head_v, longest))
    return workspace_bytes(tokens, sequences, heads, head_k, rule) + cut.segment_bytes(tokens, sequences, heads)


@dataclass(frozen=True, kw_only=True)
class JoinSpec(Join, LinearSpec):
    """States between segments of these attentions."""

    family: ClassVar[str] = "chunk_linear_attention_join"

    def constants(self) -> dict[str, Any]:
        return super().constants() | {"image": self.image.bytes}
