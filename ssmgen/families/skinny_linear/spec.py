"""skinny_linear: products of 1 to 16 rows of x at the speed of memory, by tensor cores for weights of 16 or 8 bits, or without them.

Tensor cores: a block is persistent: it has every gridDim-th tile of 16 rows of the weights, up to `tiles` of them at once, whose sums
stay in registers.
One warp copies pieces of tiles to shared memory with bulk copies, `stages` ahead; eight warps multiply. The same piece of all tiles comes
before the next piece, so that x is read once for `tiles` tiles. The weights are constant: copies begin before the wait for the upstream
kernel.

The order of sums is the same in every variant. K is cut into slots of 64. Slots c, c + 8, c + 16, … are chain c, which `mma.sync.m16n8k16`
sums in ascending order, four products per slot. The eight chains are added pairwise, then the bias. The columns of a product are rows of
x, which do not depend on each other: a row has the same bits whatever the other rows are.

Weights of 8 bits are converted to x's type in registers, exactly. A product then has the same elements in the same places as a product with
these weights in x's type, and the same sums, which the epilogue multiplies by the scale of the weight's row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ...compile.occupancy import SHARED_RESERVED, most_shared
from ...spec.kernel import SM90, Arch, DType, KernelSpec, Loads, Narrow, Needs, Param, Pdl, is_pow2, must
from .operands import OPERANDS
from .problem import OPERATOR, SkinnyProblem

SLOT, CHAINS, TILE = 64, 8, 16  # elements of a slot; chains; rows of a weight
PAD = {2: 64, 1: 32}  # by bytes of a weight: bytes between rows of a stage, such that loads of neighbouring rows use all banks
REGISTERS, SPARE = 224, 44  # that a thread may have, of 288; those for all but sums and x


class SkinnyKernel(KernelSpec, SkinnyProblem):
    """Common to both kinds of kernels."""

    table: ClassVar[Any] = OPERANDS

    def early_operands(self) -> list[str]:
        """Weights are constant."""
        return self.names("weight")

    def parameters(self) -> list[Param]:
        """Pointers come first."""
        lengths = [name.replace("weight", "n") for name in self.names("weight")][: 1 if self.gated else None]
        counts = [Param.u32("rows"), *map(Param.u32, lengths)]
        return [*OPERANDS.pointers(self), *counts, *OPERANDS.stride_params(self), *([Param.f32("eps")] if self.norm else [])]

    @property
    def said_problem(self) -> str:
        """The part of the name for the problem."""
        types = self.x.value + ("" if self.out is self.x else f"_{self.out.value}")
        more = (f"_{self.weights}w" if self.weights > 1 else "") + ("_bias" if self.bias else "")
        if self.narrow:
            types += f"_{self.narrow.value}" + ("" if self.scale is DType.F32 else "_own")
        elif self.scale:
            types += "_scaled" + ("" if self.scale is DType.F32 else "_own")
        more += (
            ("_silu" if self.gated else "_relu2" if self.relu2 else "")
            + ("_norm" if self.norm else "")
            + ("_residual" if self.residual else "")
        )
        return f"{types}_k{self.k}r{self.rows}{more}{'' if self.loads is Loads.VECTOR else '_any'}"


@dataclass(frozen=True, kw_only=True)
class SkinnySpec(SkinnyKernel):
    """A problem, and how one variant computes it. No choice here changes a bit of the result."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "skinny_linear/skinny_linear.cu.j2"

    tiles: int  # of a block at once
    stages: int  # pieces of tiles in shared memory
    slots: int = 1  # of each chain, in a piece
    held: int = 2  # pieces of x in registers
    warps: int = 8  # that multiply: each has 8 / warps chains
    joined: int = 2  # tiles whose sums are in shared memory at once
    min_blocks: int = 1  # per SM, the next kernel's blocks included: for ptxas
    pdl: Pdl = Pdl.OFF

    @property
    def needs(self) -> Needs:
        narrow = self.narrow is not None
        return Needs(
            barriers=True, once=True, meetings=True, places=True, placed_pairs=narrow, elements=self.loads is Loads.ELEMENT,
            mma=self.x.value,
            differences=self.narrow is Narrow.I8, math=self.gated or self.norm is not None,
        )  # fmt: skip

    def early_operands(self) -> list[str]:
        """The norm's weight is constant, too."""
        return super().early_operands() + (["norm_weight"] if self.norm else [])

    @property
    def order(self) -> tuple[str | int, ...]:
        return (self.family,)

    @property
    def stays(self) -> bool:
        return True

    @property
    def threads_per_block(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def piece(self) -> int:
        """Elements of a row in a stage."""
        return SLOT * CHAINS * self.slots

    @property
    def pieces(self) -> int:
        return -(-self.k // self.piece)

    @property
    def row_words(self) -> int:
        """32-bit words from one row of a stage to the next one."""
        size = self.weight.size
        return (size * self.piece + PAD[size]) // 4

    @property
    def sum_words(self) -> int:
        """Words of the sums of a tile by one warp."""
        return TILE * (self.rows + 1)

    @property
    def norm_words(self) -> int:
        """Words of a norm: for each row of x, the sums of passes of 256 elements, and their result."""
        return self.rows * (-(-self.k // 256) + 1) if self.norm else 0

    @property
    def dynamic_bytes(self) -> int:
        return 4 * (self.stages * TILE * self.row_words + max(self.joined * self.warps * self.sum_words, self.norm_words))

    @property
    def registers(self) -> int:
        """Registers of a thread for sums and x."""
        chains, columns = CHAINS // self.warps, self.rows // 8
        return chains * columns * (4 * self.tiles + 8 * self.held * self.slots)

    @property
    def stem(self) -> str:
        how = f"t{self.tiles}s{self.stages}h{self.held}" + (f"x{self.slots}" if self.slots > 1 else "")
        how += f"w{self.warps}" if self.warps != CHAINS else ""
        how += f"b{self.min_blocks}" if self.min_blocks > 1 else ""
        return f"skinny_{self.said_problem}_{how}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def violations(self, arch: Arch) -> list[str]:
        if problems := [
            *self.faults(),
            *must(self.x is not DType.F32, "x is f32; expected bf16 or f16, for tensor cores"),
            *must(self.warps in (4, 8), f"warps is {self.warps}; expected 4 or 8"),
            *must(self.slots in (1, 2, 4), f"slots is {self.slots}; expected 1, 2 or 4"),
        ]:
            return problems
        most = most_shared(arch)
        shared, room = self.dynamic_bytes + 16 * self.stages, REGISTERS // self.min_blocks - SPARE
        return [
            *must(arch >= SM90, f"arch is {arch}; expected sm_90 or later for bulk copies"),
            *must(1 <= self.tiles <= 16, f"tiles is {self.tiles}; expected 1 … 16"),
            *must(2 <= self.stages <= 32, f"stages is {self.stages}; expected 2 … 32"),
            *must(1 <= self.joined <= self.tiles, f"joined is {self.joined}; expected 1 … {self.tiles}, the tiles"),
            *must(self.min_blocks in (1, 2), f"min_blocks is {self.min_blocks}; expected 1 or 2"),
            *must(1 <= self.held <= self.pieces, f"held is {self.held}; expected 1 … {self.pieces}, the pieces of a row"),
            *must(self.registers <= room, f"sums and x take {self.registers} registers; expected at most {room}"),
            *must(
                self.min_blocks * (shared + SHARED_RESERVED) <= most + SHARED_RESERVED,
                f"min_blocks is {self.min_blocks} with {shared} bytes of shared memory per block; expected fewer blocks or stages",
            ),
            *must(shared <= most, f"a block takes {shared} bytes of shared memory; expected at most {most} on {arch}"),
        ]

    def constants(self) -> dict[str, Any]:
        return {
            "whole": self.k % self.piece == 0,
            "vector": self.loads is Loads.VECTOR,
            "count": 1 if self.gated else self.weights,
            "columns": self.rows // 8,
            "pad": PAD[self.weight.size],
        }


def tiles_of(n: int) -> int:
    """Tiles of a weight of n rows; of two weights of n / 2 rows each, whose tiles have 8 rows of both, likewise."""
    return -(-n // TILE)


def pdls(arch: Arch) -> Iterator[Pdl]:
    yield from (Pdl.OFF, Pdl.WAIT, Pdl.TRIGGER_TOP, Pdl.TRIGGER_LOADED) if arch >= SM90 else (Pdl.OFF,)


@dataclass(frozen=True, kw_only=True)
class FmaSpec(SkinnyKernel):
    """A problem, and how a kernel without tensor cores computes it: for weights of f32, and for cards without bulk copies. No choice here
    changes a bit of the result of such a kernel.

    A warp has `tile` rows of the weights at once. Its lanes load 16 bytes of each row per step (8 bytes if weights have 8 bits), `depth`
    steps before they are used; x comes from the L1 cache. Each lane sums its elements of all steps in ascending order, one fused
    multiply-add each; then pairs of lanes are added, at distances 16, 8, 4, 2 and 1. This order is not the tensor cores'.
    """

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
