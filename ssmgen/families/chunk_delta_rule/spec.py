"""chunk_delta_rule: the gated delta rule over whole sequences, in chunks of 64 tokens on the tensor cores, by two kernels.

With gamma the running sum of a chunk's log2 decays, and rk = 1 / |k|, rq = scale / |q| (or 1 and scale), a chunk that begins in S gives

    A_ij = beta_j rk_i rk_j 2^(gamma_i - gamma_j) k_i.k_j, j < i        T = (I + A)^-1
    P_ij = beta_j rq_i rk_j 2^(gamma_i - gamma_j) q_i.k_j, j <= i
    X = v - 2^gamma rk (k S^T)        u = T X        o = 2^gamma rq (q S^T) + P u
    S <- 2^gamma_last S + (beta 2^(gamma_last - gamma) rk u)^T k

beta is in columns of A, not in rows: T's diagonal is then exactly one, and u has no factor beta. T and P do not depend on S. The first
kernel computes them for all chunks at once, and stores an *image* in the workspace for each chunk and head. The second one scans a
sequence's chunks with some rows of a head's S in f32 in registers.
Three more, between them, serve sequences that are cut into segments (engine/chunks/segments.py).
Bytes per token and head: 4 V of v and out, 2 x 174 of images, 4 K / (heads of a key head) of q and k, in each kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.chunks.kernels import ChunkKernel
from ...engine.chunks.problem import CHUNK
from ...engine.chunks.segments import Join, asked
from ...spec.kernel import Pdl
from .operands import KERNELS
from .problem import COEFFICIENTS, COEFFICIENTS_AT, IMAGE, P_AT, PANEL_BYTES, PANELS, T_AT, ChunkProblem, DeltaProblem, Gate, image_bytes


@dataclass(frozen=True, kw_only=True)
class DeltaSpec(ChunkKernel, ChunkProblem):
    """How one of a call's kernels computes its part."""

    word: ClassVar[str] = "delta"
    table: ClassVar[Any] = KERNELS

    pdl: Pdl = Pdl.OFF

    @property
    def takes_q(self) -> bool:
        return self.prepares or self.outputs

    @property
    def takes_k(self) -> bool:
        return self.prepares or self.walks

    def constants(self) -> dict[str, Any]:
        return {
            "chunk": CHUNK,
            "image": IMAGE,
            "panels": PANELS,
            "panel_bytes": PANEL_BYTES,
            "t_at": T_AT,
            "p_at": P_AT,
            "coefficients_at": COEFFICIENTS_AT,
            "coefficients": COEFFICIENTS,
            "gated": self.gate is not Gate.NONE,
        }


def workspace_for(tokens: int, sequences: int, heads: int, head_k: int, head_v: int, segments: int | None, longest: int) -> int:
    """Bytes that a call needs: images, then the results of segments."""
    cut = DeltaProblem(head_k=head_k, head_v=head_v, **asked(segments, heads, head_v, longest))
    return image_bytes(tokens, sequences, heads) + cut.segment_bytes(tokens, sequences, heads)


@dataclass(frozen=True, kw_only=True)
class JoinSpec(Join, DeltaSpec):
    """States between segments of the delta rule."""

    family: ClassVar[str] = "chunk_delta_rule_join"
