"""skinny_linear without tensor cores: for weights of f32, and for cards without bulk copies.

A warp has `tile` rows of the weights at once. Its lanes load 16 bytes of each row per step (8 bytes if weights have 8 bits), `depth` steps
before they are used; x comes from the L1 cache. Each lane sums its elements of all steps in ascending order, one fused multiply-add each;
then pairs of lanes are added, at distances 16, 8, 4, 2 and 1. All these variants have the same order, which is not the tensor cores'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...spec.kernel import Arch, Loads, Needs, Pdl, is_pow2, must
from .spec import SkinnyKernel


@dataclass(frozen=True, kw_only=True)
class FmaSpec(SkinnyKernel):
    """A problem, and how one variant computes it. No choice here changes a bit of the result of such a kernel."""

    family: ClassVar[str] = "skinny_linear_fma"
    template: ClassVar[str] = "skinny_linear/fma.cu.j2"

    tile: int  # rows of a weight, of a warp
    depth: int = 2  # steps that are loaded at once
    warps: int = 8  # of a block
    min_blocks: int = 2  # per SM, for which ptxas must leave registers: left to itself, it spills
    pdl: Pdl = Pdl.OFF

    @property
    def order(self) -> tuple[str | int, ...]:
        return (self.family,)

    @property
    def needs(self) -> Needs:
        return Needs(elements=self.loads is Loads.ELEMENT, math=self.gated or self.norm is not None)

    @property
    def threads_per_block(self) -> int:
        return 32 * self.warps

    @property
    def vec(self) -> int:
        """Elements per lane and step."""
        return 16 // self.x.size

    @property
    def steps(self) -> int:
        return -(-self.k // (32 * self.vec))

    @property
    def stem(self) -> str:
        how = f"t{self.tile}d{self.depth}w{self.warps}"
        return f"skinny_fma_{self.said_problem}_{how}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def violations(self, arch: Arch) -> list[str]:
        return [
            *self.faults(),
            *must(self.tile in (1, 2, 4, 8), f"tile is {self.tile}; expected 1, 2, 4 or 8"),
            *must(not self.gated or self.tile > 1, f"tile is {self.tile}; expected 2, 4 or 8: half of each of two weights"),
            *must(1 <= self.depth <= 4, f"depth is {self.depth}; expected 1 … 4"),
            *must(is_pow2(self.warps) and self.warps <= 16, f"warps is {self.warps}; expected 1, 2, 4, 8 or 16"),
            *must(self.tile * self.rows <= 64, f"tile * rows is {self.tile * self.rows}; expected at most 64, the sums that a lane holds"),
            *must(
                self.tile * self.depth <= 16,
                f"tile * depth is {self.tile * self.depth}; expected at most 16, the vectors that a lane holds",
            ),
            *self.arch_violations(arch),
        ]

    def constants(self) -> dict[str, Any]:
        return {"whole": self.k % (32 * self.vec) == 0, "vector": self.loads is Loads.VECTOR, "count": 1 if self.gated else self.weights}
