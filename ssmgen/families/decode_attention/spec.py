"""decode_attention: the attention of one new token per sequence, from the products of q, k and v to the heads' outputs.

A cluster of `blocks` blocks shares one sequence and `heads` query heads of one key head, and divides the keys. `lanes` lanes hold a key,
so that a warp reads several keys at once, and each lane has loads of `ilp` keys in flight. Bytes per key head: 2 * (position + 1) *
head_dim * sizeof(cache), once from memory; everything else is small.

Every lane group sums its own keys in ascending order. Groups of a warp, then warps of a block, then blocks are added in a fixed order. That
order depends on the choices of the variant, and not on the batch: the rules choose by the problem alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ...compile.occupancy import shared_violations
from ...spec.kernel import SM90, Arch, DType, KernelSpec, Needs, Param, Pdl, Problem, is_pow2, must
from ...spec.variants import spec_of, trials
from .operands import OPERANDS

OPERATOR = "decode_attention"
SIZE, MAX_SIZE = "heads", 2**16

MOST_DIM = 256  # channels of a head
MOST_GROUP = 64  # query heads of a key head
MOST_HEADS = 8  # query heads of one block, whose q and outputs are in registers
MOST_BLOCKS = 8  # of a cluster that every device with clusters can launch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionProblem(Problem):
    """The problem that a call fixes. Batch, key heads, room and strides are arguments of the launch."""

    head_dim: int
    group: int  # query heads of a key head
    x: DType = DType.BF16  # of q, k, v and out
    cache: DType = DType.BF16
    rotary: int = 0  # channels that are rotated, the first ones of a head
    angles: DType | None = None  # of cos and sin
    norm: DType | None = None  # of the weights of q's and k's norms
    unit_offset: bool = False  # 1 + weight
    gate: DType | None = None

    @property
    def vec(self) -> int:
        """Elements of a 16-byte load from a cache."""
        return 16 // self.cache.size

    def divided(self, most: int) -> int:
        """Query heads of one block, at most `most`: the largest divisor of the group."""
        return max(n for n in range(1, min(most, self.group) + 1) if self.group % n == 0)

    @property
    def vectors(self) -> int:
        """16-byte loads of a key."""
        return self.head_dim // self.vec

    @property
    def lanes(self) -> int:
        """Lanes that hold a key."""
        return min(32, 1 << (self.vectors - 1).bit_length())

    @property
    def passes(self) -> int:
        """Vectors of a lane."""
        return -(-self.vectors // self.lanes)

    def faults(self) -> list[str]:
        """Constraints that no variant can meet."""
        return [
            *must(
                8 <= self.head_dim <= MOST_DIM and self.head_dim % 8 == 0,
                f"head_dim is {self.head_dim}; expected a multiple of 8 up to {MOST_DIM}",
            ),
            *must(1 <= self.group <= MOST_GROUP, f"group is {self.group}; expected 1 … {MOST_GROUP} query heads for each key head"),
            *must(
                0 <= self.rotary <= self.head_dim and self.rotary % 2 == 0,
                f"rotary is {self.rotary}; expected an even number up to head_dim {self.head_dim}",
            ),
            *must((self.rotary > 0) == (self.angles is not None), "one of rotary and angles is missing; expected both or neither"),
            *must(self.norm is not None or not self.unit_offset, "unit_offset is yes and norm is none; expected a norm"),
        ]


@dataclass(frozen=True, kw_only=True)
class DecodeAttentionSpec(KernelSpec, DecodeAttentionProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR
    template: ClassVar[str] = "decode_attention/decode_attention.cu.j2"
    table: ClassVar[Any] = OPERANDS

    heads: int  # query heads of a block: changes no bit
    blocks: int = 1  # that divide the keys of a sequence
    warps: int
    ilp: int  # keys of a lane in flight
    min_blocks: int = 0
    pdl: Pdl = Pdl.OFF

    @property
    def needs(self) -> Needs:
        return Needs(math=True, shared_quads=True)

    @property
    def order(self) -> tuple[str | int, ...]:
        return self.blocks, self.warps, self.ilp

    @property
    def cluster_blocks(self) -> int:
        return self.blocks

    @property
    def threads_per_block(self) -> int:
        return 32 * self.warps

    @property
    def chunks(self) -> int:
        """Clusters that share a key head, each with other query heads."""
        return self.group // self.heads

    @property
    def dynamic_bytes(self) -> int:
        """The outputs of each warp."""
        return 4 * self.warps * self.heads * self.head_dim

    @property
    def static_bytes(self) -> int:
        rows = (self.heads + 2) * self.head_dim
        stats = 2 * self.warps * self.heads
        return 4 * (rows + stats + (self.heads * self.head_dim + 2 * self.blocks * self.heads if self.blocks > 1 else 0))

    def early_operands(self) -> list[str]:
        """Weights are constant."""
        return [name for name in ("q_norm", "k_norm") if self.norm]

    @property
    def stem(self) -> str:
        parts = [f"r{self.rotary}" if self.rotary else "", "norm" if self.norm else "", "gate" if self.gate else ""]
        how = f"h{self.heads}b{self.blocks}w{self.warps}i{self.ilp}{'' if self.pdl is Pdl.OFF else '_pdl'}"
        return "_".join(["decode_attention", f"d{self.head_dim}g{self.group}", self.cache.value, *filter(None, parts), how])

    def violations(self, arch: Arch) -> list[str]:
        return [
            *self.faults(),
            *must(
                1 <= self.heads <= MOST_HEADS and self.group % self.heads == 0,
                f"heads is {self.heads}; expected a divisor of group {self.group} up to {MOST_HEADS}",
            ),
            *must(is_pow2(self.blocks) and self.blocks <= MOST_BLOCKS, f"blocks is {self.blocks}; expected 1, 2, 4 or {MOST_BLOCKS}"),
            *must(self.blocks == 1 or arch >= SM90, f"blocks is {self.blocks} on {arch}; expected 1 before sm_90, which has no clusters"),
            *must(self.warps in (2, 4, 8), f"warps is {self.warps}; expected 2, 4 or 8"),
            *must(self.ilp in (1, 2, 4), f"ilp is {self.ilp}; expected 1, 2 or 4"),
            *shared_violations(arch, self.dynamic_bytes + self.static_bytes),
            *self.arch_violations(arch),
        ]

    def parameters(self) -> list[Param]:
        """Pointers come first."""
        numbers = [Param.f32("scale_log2"), Param.f32("key_scale"), *([Param.f32("eps")] if self.norm else [])]
        strides = OPERANDS.stride_params(self)
        wide = [p for p in strides if p.code == "q"]
        narrow = [p for p in strides if p.code != "q"]
        return [*OPERANDS.pointers(self), *wide, Param.u32("room"), *Param.divisor("kv_heads"), *narrow, *numbers]

    def constants(self) -> dict[str, Any]:
        return {"whole": self.vectors == self.lanes * self.passes, "rows": self.heads + 2}


def space(problem: DecodeAttentionProblem, arch: Arch) -> Iterator[DecodeAttentionSpec]:
    """Every legal variant of a problem within the axes worth trying."""
    heads = [n for n in range(1, MOST_HEADS + 1) if problem.group % n == 0]
    axes = {
        "heads": heads,
        "blocks": (1, 2, 4, 8),
        "warps": (4, 8),
        "ilp": (1, 2, 4),
        "pdl": (Pdl.OFF, Pdl.WAIT, Pdl.TRIGGER_TOP, Pdl.TRIGGER_LOADED),
    }
    return trials(DecodeAttentionSpec, problem, arch, axes)


def _heads(problem: DecodeAttentionProblem, heads: int) -> int:
    """Query heads of a block. Measured on an H200 (docs/lab/decode_attention.md).

    Up to 8 key heads of all sequences leave SMs idle, so a block has one query head. Otherwise several share the loads of a key, up to the
    number that leaves registers for four blocks per SM.
    """
    if heads <= 8:
        return 1
    return problem.divided(5 if problem.head_dim <= 128 else 2)


def candidates(problem: DecodeAttentionProblem, heads: int, arch: Arch, pdl: bool) -> Iterator[tuple[str, DecodeAttentionSpec | None, str]]:
    """(rule, spec or None, why it does not apply), best first. The last one applies to every legal problem.

    No rule divides the keys by the number of heads: another division would give other bits.
    """
    how: dict[str, Any] = {"heads": _heads(problem, heads), "pdl": Pdl.TRIGGER_TOP if pdl else Pdl.OFF}
    if arch < SM90:
        yield "clusters", None, f"{arch} has no clusters; expected sm_90 or later"
    else:
        yield "clusters", spec_of(DecodeAttentionSpec, problem, blocks=MOST_BLOCKS, warps=4, ilp=4, **how), ""
    yield "one-block", spec_of(DecodeAttentionSpec, problem, warps=8, ilp=4, **how), ""
