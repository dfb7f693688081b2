"""The kernel before warps with roles: angles of tokens and norms of rows, which every block of a head would compute again.

Angles: tanh of a token's logits is the same for all heads if the logits are, so a block has several heads. The blocks of a cluster share
the chunks of a sequence, and first sum each chunk's angles, in half turns. After a barrier, every block adds the sums of chunks in order,
and stores the angle of each token as f32 radians. The sums have the order of the variants without roles, so the bits are the same.
Norms: a warp has a row of B and the same row of C, and stores 1 / rms of both.

The workspace has, in f32: angles [heads, tokens, angles rounded up to 4], for parts once more from zeros at each part's start; norms
[groups, tokens, rank, 2], of C and of B; and the sums of chunks [chunks, heads, angles].
Bytes per token and head: 4 n of angles, twice written and once read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...spec.kernel import LATER, Arch, KernelSpec, Needs, Param, Pdl, must
from .operands import OF_ANGLES, OF_NORMS, OPERANDS
from .problem import ROWS, Mamba3PromptProblem

MOST_COLUMNS = 128  # of a state, with warps of several roles: the norm's sums have the order of the other variants up to here
MOST_TILE = 64  # rows of a head: a warp that holds the state has 16, and at most 64 numbers per thread
HEADS = 4  # of a block
TEAM, TEAMS = 8, 2  # warps of a chunk: each has the tokens that one of eight warps has in other variants; and chunks of a block at once
BLOCKS = 8  # of a cluster


def words_of(angles: int, rank: int, segments: int | None, tokens: int, sequences: int, heads: int, groups: int) -> int:
    """32-bit words of the workspace. tokens: of all sequences."""
    copies = 1 if (segments or 1) == 1 else 2
    of_angles = copies * heads * tokens * -(-angles // 4) * 4
    sums = heads * angles * (tokens // (ROWS // max(1, min(rank, ROWS))) + sequences)
    return of_angles + 2 * groups * tokens * rank + sums


@dataclass(frozen=True, kw_only=True)
class Mamba3PrepareSpec(KernelSpec, Mamba3PromptProblem):
    """A problem, and how its angles are divided over blocks. No choice here changes a bit of the result; parts have their own angles."""

    family: ClassVar[str] = "mamba3_chunk_scan_prepare"
    template: ClassVar[str] = "mamba3_chunk_scan/prepare.cu.j2"
    prepared: ClassVar[bool] = True  # has a workspace
    prepares: ClassVar[bool] = True  # and writes it
    terms: ClassVar[int] = 1

    pdl: Pdl = Pdl.OFF
    blocks: int = field(default=BLOCKS, metadata=LATER)  # that share a sequence
    parts: int = field(default=1, metadata=LATER)  # of a sequence, at most

    @property
    def needs(self) -> Needs:
        return Needs(math=True, bytes=self.started)

    @property
    def threads_per_block(self) -> int:
        return 32 * TEAM * TEAMS

    @property
    def cluster_blocks(self) -> int:
        return self.blocks if self.rotates else 1

    @property
    def min_blocks(self) -> int:
        """Per SM: two do not leave enough registers."""
        return 1

    @property
    def turn_words(self) -> int:
        """32-bit words of a token's angles."""
        return -(-self.angles // 4) * 4

    @property
    def span(self) -> int:
        """Tokens of a warp."""
        return -(-self.chunk // TEAM)

    @property
    def stem(self) -> str:
        shape = f"n{self.d_state}r{self.rank}a{self.angles}_{self.x.value}"
        how = (f"b{self.blocks}" if self.blocks > 1 else "") + (f"k{self.parts}" if self.parts > 1 else "")
        return f"mamba3_prepare_{shape}_{how}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def grid(self, rows: int, sequences: int, heads: int) -> int:
        """Blocks of a launch. rows: of B, in all groups."""
        if self.rotates:
            return sequences * -(-heads // HEADS) * self.blocks
        return max(1, min(-(-rows // (TEAM * TEAMS)), 1024))

    def violations(self, arch: Arch) -> list[str]:
        if problems := self.faults():
            return problems
        return [
            *must(self.blocks in (1, BLOCKS), f"blocks is {self.blocks}; expected 1 or {BLOCKS}"),
            *must(arch >= Arch(90), f"arch is {arch}; expected sm_90 or later, for clusters"),
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
        slots = [Param.i64("slots"), Param.i64("pad_slot_id")] if "state_indices" in names else []
        strides = [(Param.i64 if width == "i64" else Param.u32)(f"{name}_{axis}") for name, axis, width in OPERANDS.strides(self, names)]
        wide, narrow = ([p for p in strides if (p.code == "q") is is_wide] for is_wide in (True, False))
        counts = ("tokens", "all_tokens", "heads", "group_heads")
        numbers = ("eps",) if self.row_norm is not None else ()
        return [*OPERANDS.pointers(self, names), *slots, *wide, *map(Param.u32, counts), *narrow, *map(Param.f32, numbers)]

    def constants(self) -> dict[str, Any]:
        return {
            "pooled": self.rotates and "state_indices" in self.operands(),
            "past": "pool" if self.started else "initial" if self.initial else "",
            "rows": ROWS,
            "chunk": self.chunk,
            "heads_of_block": HEADS,
            "team": TEAM,
            "teams": TEAMS,
            "rate": self.rate.value,
            "softplus": self.dt_softplus or self.rate.value == "softplus",
            "sigmoid": False,
            "silu": False,
            "halves": self.rotates and self.rotary.value == "halves",
        }
