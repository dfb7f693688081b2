"""What a prompt of a linear attention with a decay per key channel can ask for; and where the images of its chunks lie."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

OPERATOR = "chunk_linear_attention"
SIZE, MAX_SIZE = "heads", 2**31 - 1  # what the rules look at: sequences are not among it, so that bits do not depend on how many there are

ROWS = 64  # of a chunk's matrices
BLOCK = 64  # columns of one that lie together, 128 bytes a row
BLOCK_BYTES = ROWS * BLOCK * 2
PANEL = 16  # columns of T or P that lie together
PANELS = ROWS // PANEL
# A panel begins with the row that its first column crosses the diagonal in: what is above is zero, and is not kept.
PANEL_BYTES = tuple((ROWS - PANEL * c) * PANEL * 2 for c in range(PANELS))


class Rule(Enum):
    """What a token's update reads from the state: nothing, the decayed state, or the state before its decay."""

    PLAIN = "plain"  # S <- S D + v k^T
    DELTA = "delta"  # S <- S D + (v - S D e) w^T
    OLD = "old"  # S <- S D + (v - S e) w^T
    LOW_RANK = "low_rank"  # S <- S D + (S a) b^T + v k^T: two rows per token, that of v in the first half of a chunk

    @property
    def reads(self) -> bool:
        return self is not Rule.PLAIN

    @property
    def tokens(self) -> int:
        """Tokens per chunk; part of the result's bits."""
        return ROWS // 2 if self is Rule.LOW_RANK else ROWS


class Image(NamedTuple):
    """Where the parts of a chunk and head's image begin, in bytes, and how many it takes. E and T are there if the rule reads."""

    e: int
    q: int
    w: int
    t: int
    p: int
    decay: int
    bytes: int


def image_of(head_k: int, rule: Rule) -> Image:
    matrix, panels, reads = -(-head_k // BLOCK) * BLOCK_BYTES, sum(PANEL_BYTES), int(rule.reads)
    q = reads * matrix
    t = q + 2 * matrix
    p = t + reads * panels
    decay = p + panels
    return Image(0, q, q + matrix, t, p, decay, -(-(decay + 4 * head_k) // 128) * 128)


def chunks_of(tokens: int, sequences: int, rule: Rule) -> int:
    """Chunk numbers of so many tokens in all: no fewer than their sequences need, wherever these begin.

    Chunk n of sequence s has the number begin(s) // tokens per chunk + s + n, where begin(s) is its first token: no two have the same, and
    no sum over sequences is needed to say it. A number that is nobody's is left out.
    """
    return tokens // rule.tokens + sequences


def workspace_bytes(tokens: int, sequences: int, heads: int, head_k: int, rule: Rule) -> int:
    """What the images of all chunks take: that of number n and head h lies at (n heads + h) times an image's bytes."""
    return chunks_of(tokens, sequences, rule) * heads * image_of(head_k, rule).bytes
