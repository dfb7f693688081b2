"""The first kernel of chunk_delta_rule: what of a chunk does not hang on the state, of all chunks at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...spec import Arch, Needs, Pdl, must
from .spec import Counts, DeltaSpec

WARPS = 4  # of 16 tokens each


@dataclass(frozen=True, kw_only=True)
class PrepareSpec(DeltaSpec):
    """Images of the chunks of one key head's values, from q, k and gates. No choice here changes a bit of the result."""

    family: ClassVar[str] = "chunk_delta_rule_prepare"
    template: ClassVar[str] = "chunk_delta_rule/prepare.cu.j2"
    here: ClassVar[tuple[str, ...]] = ("q", "k", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "images")
    written: ClassVar[tuple[str, ...]] = ("images",)
    scaled: ClassVar[bool] = True

    heads_per_block: int = 0  # heads of v that a block serves, of one of q and k; 0 = all

    @property
    def needs(self) -> Needs:
        return Needs(math=True, matrices=True, copies=True, mma=self.x.value)

    @property
    def threads_per_block(self) -> int:
        return 32 * WARPS

    @property
    def stem(self) -> str:
        shape = f"k{self.head_k}_{self.x.value}_{self.gate.value}"
        return f"delta_prepare_{shape}_h{self.heads_per_block}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def blocks(self, counts: Counts) -> int:
        per_block = self.heads_per_block or counts.group_heads
        return counts.chunks * (counts.heads // counts.group_heads) * -(-counts.group_heads // per_block)

    @property
    def shared_bytes(self) -> int:
        return 0

    def violations(self, arch: Arch) -> list[str]:
        return self.faults() or [
            *must(self.heads_per_block >= 0, f"heads_per_block {self.heads_per_block} is negative"),
            *self.common_violations(arch, self.shared_bytes),
        ]
