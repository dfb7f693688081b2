"""The first kernel of chunk_delta_rule: the parts of a chunk that do not depend on the state, for all chunks at once.

A block has a chunk of one head of q and k. Its warps share the products k k^T and q k^T, up to the diagonal; then each computes the image
(workspace) of one head of v alone, in registers except for data that changes lanes, without further synchronisation. 16 x 16 blocks of T on
the diagonal are computed by substitution in f32; the blocks below by products of tf32, one row of blocks after the other.
Bytes per token: 4 K / (heads of a key head) read, 174 written per head of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.chunks.kernels import Counts
from ...engine.chunks.problem import CHUNK
from ...engine.recurrences.attention.problem import Beta
from ...spec.arguments import divisor
from ...spec.kernel import Arch, Needs, Param, Pdl, must
from .problem import Gate
from .spec import DeltaSpec

WARPS = 4  # of a block; also the most heads of v
BANDS = CHUNK // 16
SUM_WORDS = 2 * BANDS * (BANDS + 1) // 2 * 256  # of shared memory: k k^T and q k^T up to the diagonal, in blocks of 16 x 16
OWN_WORDS = 4 * CHUNK + BANDS * (16 * 20 + 8)  # each warp's: gamma, factors of rows and columns, steps; blocks on the diagonal of T


@dataclass(frozen=True, kw_only=True)
class PrepareSpec(DeltaSpec):
    """Images of a chunk, from q, k and gates. No choice here changes a bit of the result."""

    family: ClassVar[str] = "chunk_delta_rule_prepare"
    template: ClassVar[str] = "chunk_delta_rule/prepare.cu.j2"
    prepares: ClassVar[bool] = True

    min_blocks: int = 4  # blocks per SM that ptxas must leave registers for: with 4, a thread has 128

    @property
    def needs(self) -> Needs:
        return Needs(
            math=True, logs=self.gate is Gate.LINEAR, bytes=True, matrices=True, places=True, copies=True, meetings=True,
            mma=self.x.value, tf32=True,
        )  # fmt: skip

    @property
    def numbers(self) -> tuple[str, ...]:
        return ("scale",)

    @property
    def threads_per_block(self) -> int:
        return 32 * WARPS

    @property
    def stem(self) -> str:
        shape = f"k{self.head_k}_{self.x.value}_{self.gate.value}"
        blocks = "" if self.min_blocks == 4 else f"_b{self.min_blocks}"
        return f"delta_prepare_{shape}{blocks}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def blocks(self, counts: Counts) -> int:
        per_group, _ = _divided(counts.group_heads)
        return counts.chunks * (counts.heads // counts.group_heads) * per_group

    def parameters(self) -> list[Param]:
        return [*super().parameters(), *Param.divisor("chunk_blocks"), *Param.divisor("head_blocks"), Param.u32("block_heads")]

    def counted(self, counts: Counts) -> dict[str, int]:
        per_group, heads = _divided(counts.group_heads)
        per_chunk = counts.heads // counts.group_heads * per_group
        return {**divisor("chunk_blocks", per_chunk), **divisor("head_blocks", per_group), "block_heads": heads}

    @property
    def dynamic_bytes(self) -> int:
        """Bytes of q and k; the products and each warp's own data later reuse the space."""
        row_words = -(-self.head_k // 64) * 32
        return 4 * max(2 * CHUNK * row_words, SUM_WORDS + WARPS * OWN_WORDS)

    @property
    def shared_bytes(self) -> int:
        return self.dynamic_bytes + (2 * CHUNK * 4 if self.l2norm else 0)

    def violations(self, arch: Arch) -> list[str]:
        return self.faults() or [
            *must(1 <= self.min_blocks <= 8, f"min_blocks is {self.min_blocks}; expected 1 … 8"),
            *self.common_violations(arch, self.shared_bytes),
        ]

    def constants(self) -> dict[str, Any]:
        return super().constants() | {
            "warps": WARPS,
            "own_words": OWN_WORDS,
            "softplus": self.gate is Gate.RAW,
            "sigmoid": self.beta_form is not Beta.PLAIN,
            "silu": False,
        }


def _divided(group_heads: int) -> tuple[int, int]:
    """(blocks, heads of each block except the last) for the heads of v that share a head of q and k."""
    blocks = -(-group_heads // WARPS)
    return blocks, -(-group_heads // blocks)
