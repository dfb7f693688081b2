"""The first kernel of chunk_linear_attention: the parts of a chunk that do not depend on the state, for all chunks and heads at once.

A block has a chunk of one head, each of its four warps 16 rows, and a lane eight channels of four rows. Within a
lane's rows, written keys decay from token to token in f32 and are multiplied with the reading keys: these are the 4 x 4 blocks on the
diagonals of A and P. Blocks of 4 x 4, 8 x 8, 16 x 16 and 32 x 32 below are products of 16-bit numbers that have decayed from, and to, the
beginning of the later rows: nothing is divided by a decay. T uses substitution in f32 on its diagonal, and products of tf32 below.
Bytes per token and head: keys and gates read, 6 K + 192 written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ...engine.chunks.kernels import Counts
from ...engine.recurrences.attention.problem import Beta, Gate
from ...spec.arguments import divisor
from ...spec.kernel import Arch, Loads, Needs, Param, Pdl
from .problem import ROWS, Rule
from .spec import LinearSpec

WARPS = 4  # of a block; a band of 16 rows each
WIDEST = 128  # channels that are in shared memory at once
SQUARE_WORDS = 16 * 16 + 8  # a 16 x 16 block


class _Places(NamedTuple):
    """Start of each part of a block's shared memory after q, w and e, in words, and the number of words."""

    more: int
    sums: int
    scales: int
    blocks: int
    mixed: int
    half: int
    words: int


@dataclass(frozen=True, kw_only=True)
class PrepareSpec(LinearSpec):
    """Images of a chunk, from keys and gates. No choice here changes a bit of the result."""

    family: ClassVar[str] = "chunk_linear_attention_prepare"
    template: ClassVar[str] = "chunk_linear_attention/prepare.cu.j2"
    prepares: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        elements = self.loads is Loads.ELEMENT
        return Needs(math=True, elements=elements, bytes=True, matrices=True, places=True, copies=True, mma=self.x.value, tf32=True)

    @property
    def numbers(self) -> tuple[str, ...]:
        return ("scale", "lower_bound") if self.gate is Gate.BOUNDED else ("scale",)

    @property
    def threads_per_block(self) -> int:
        return 32 * WARPS

    @property
    def stem(self) -> str:
        shape = f"{self.rule.value}_k{self.head_k}_{self.x.value}_{self.gate.value}"
        return f"linear_prepare_{shape}{'' if self.pdl is Pdl.OFF else '_pdl'}"

    def blocks(self, counts: Counts) -> int:
        return counts.chunks * counts.heads

    def parameters(self) -> list[Param]:
        return [*super().parameters(), *Param.divisor("chunk_blocks"), *Param.divisor("key_blocks")]

    def counted(self, counts: Counts) -> dict[str, int]:
        return {**divisor("chunk_blocks", counts.heads), **divisor("key_blocks", counts.group_heads)}

    @property
    def min_blocks(self) -> int:
        """Blocks per SM that ptxas must leave registers for: with 3, a thread has 168 registers, with 2 all of them."""
        return 2 if self.head_k > WIDEST or self.loads is Loads.ELEMENT else 3

    @property
    def slab(self) -> int:
        """Channels that are in shared memory at once: all, or the number that fits, and zeros after the last one."""
        return 64 if self.head_k <= 64 else WIDEST

    @property
    def own_e(self) -> bool:
        """Whether the reading key differs from the writing key by more than factors."""
        return self.read or self.erase is not None

    @property
    def places(self) -> _Places:
        matrix = ROWS * self.slab // 2
        more = (3 if self.own_e else 2) * matrix
        sums = more + matrix
        scales = sums + WARPS * self.slab
        blocks = scales + (4 if self.rule.weighs else 3) * ROWS
        mixed = blocks + WARPS * SQUARE_WORDS
        half = mixed + WARPS * SQUARE_WORDS
        return _Places(more, sums, scales, blocks, mixed, half, half + (2 * SQUARE_WORDS if self.rule is Rule.LOW_RANK else 0))

    @property
    def dynamic_bytes(self) -> int:
        """q, w, e and one more; sums, factors, and blocks of A, P and T."""
        return 4 * self.places.words

    def violations(self, arch: Arch) -> list[str]:
        return self.faults() or self.common_violations(arch, self.dynamic_bytes)

    def constants(self) -> dict[str, Any]:
        return super().constants() | {
            "slab": self.slab,
            "slabs": -(-self.head_k // self.slab),
            "own_e": self.own_e,
            "ahead": self.rule in (Rule.OLD, Rule.LOW_RANK),  # the reading key multiplies the state before its decay
            "at": self.places,
            "load_eight": "load_vector" if self.loads is Loads.VECTOR else "load_elements",
            "one_apart": "" if self.loads is Loads.VECTOR else ", 1",
            "softplus": self.gate is Gate.SOFTPLUS,
            "sigmoid": self.beta_form is not Beta.PLAIN or self.gate is Gate.BOUNDED,
            "silu": False,
        }
