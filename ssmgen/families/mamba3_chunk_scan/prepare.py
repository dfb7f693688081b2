"""The kernel before warpgroups. It makes angles of tokens and norms of rows, which every block of a head would compute again.

Angles: a block has one chunk of several heads. tanh of a token's logits is the same for all heads if the logits are, so its warps share
them. Each warp then sums the angles of one head, from the chunk's first token to its last one, and stores each token's angle from the
chunk's start as f32 half turns. It also stores the sum of the chunk, which the scan adds to the angle before the first token.
Norms: a warp has rows of B and the same rows of C, and stores 1 / rms of both.

The workspace has, in f32: angles [heads, tokens, angles rounded up to 4]; norms [groups, tokens, 2], of C and of B; and the sums of chunks
[chunks, heads, angles]. Bytes per token and head: 4 n of angles, once written and once read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...spec.kernel import Arch, KernelSpec, Needs, Param, Pdl, must
from .operands import OF_ANGLES, OF_NORMS, OPERANDS
from .problem import ROWS, Mamba3PromptProblem

WARPS = 8  # of a block, with a head each; and sums of a chunk, each of the tokens that one of eight warps has in other variants


def words_of(angles: int, tokens: int, sequences: int, heads: int, groups: int) -> int:
    """32-bit words of the workspace. tokens: of all sequences."""
    of_angles = heads * tokens * -(-angles // 4) * 4
    return of_angles + 2 * groups * tokens + heads * angles * (tokens // ROWS + sequences)


@dataclass(frozen=True, kw_only=True)
class Mamba3PrepareSpec(KernelSpec, Mamba3PromptProblem):
    """A problem. No choice here changes a bit of the result."""

    family: ClassVar[str] = "mamba3_chunk_scan_prepare"
    template: ClassVar[str] = "mamba3_chunk_scan/prepare.cu.j2"
    prepared: ClassVar[bool] = True  # has a workspace
    prepares: ClassVar[bool] = True  # and writes it
    terms: ClassVar[int] = 1

    pdl: Pdl = Pdl.OFF

    @property
    def needs(self) -> Needs:
        return Needs(math=True, bytes=self.started, shared_quads=self.rotates)

    @property
    def threads_per_block(self) -> int:
        return 32 * WARPS

    @property
    def min_blocks(self) -> int:
        """Per SM: 32 warps hide the latency of the sums. Lanes with two angles need more registers."""
        return 4 if self.angles <= 32 else 2

    @property
    def turn_words(self) -> int:
        """32-bit words of a token's angles."""
        return -(-self.angles // 4) * 4

    @property
    def span(self) -> int:
        """Tokens that are summed first. The sums are then summed."""
        return -(-self.chunk // WARPS)

    @property
    def stem(self) -> str:
        shape = f"n{self.d_state}a{self.angles}_{self.x.value}"
        return f"mamba3_prepare_{shape}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def grid(self, rows: int, tokens: int, sequences: int, heads: int) -> int:
        """Blocks of a launch. rows: of B, in all groups. tokens: of all sequences."""
        if self.rotates:
            chunks = tokens // ROWS + sequences if self.ragged else sequences * -(-tokens // (sequences * ROWS))
            return max(1, chunks) * -(-heads // WARPS)
        return max(1, min(-(-rows // WARPS), 1024))

    def violations(self, arch: Arch) -> list[str]:
        if problems := self.faults():
            return problems
        return [
            *must(arch >= Arch(90), f"arch is {arch}; expected sm_90 or later, as the scan behind it does"),
            *must(self.rank == 1, f"rank is {self.rank}; expected 1"),
            *must(self.rotates or self.row_norm is not None, "angle and row_norm are none; expected one, or no such kernel"),
            *must(self.d_state <= 128, f"d_state is {self.d_state}; expected at most 128: a lane has four numbers of a row"),
        ]

    def operands(self) -> list[str]:
        """Tensor arguments in order."""
        taken = (*(OF_ANGLES if self.rotates else ()), *(OF_NORMS if self.row_norm is not None else ()), "workspace")
        return [name for name in OPERANDS.of(self) if name in taken]

    def parameters(self) -> list[Param]:
        """Pointers come first."""
        names = self.operands()
        strides = [(Param.i64 if width == "i64" else Param.u32)(f"{name}_{axis}") for name, axis, width in OPERANDS.strides(self, names)]
        wide, narrow = ([p for p in strides if (p.code == "q") is is_wide] for is_wide in (True, False))
        counts = ("tokens", "all_tokens", "heads", "group_heads", *(("sequences",) if self.rotates and self.ragged else ()))
        numbers = ("eps",) if self.row_norm is not None else ()
        return [*OPERANDS.pointers(self, names), *wide, *map(Param.u32, counts), *narrow, *map(Param.f32, numbers)]

    def constants(self) -> dict[str, Any]:
        return {
            "warps": WARPS,
            "chunk": self.chunk,
            "rate": self.rate.value,
            "softplus": self.dt_softplus or self.rate.value == "softplus",
            "sigmoid": False,
            "silu": False,
            "halves": self.rotates and self.rotary.value == "halves",
        }
