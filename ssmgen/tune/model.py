"""What a variant may be expected to take: enough to leave out those that cannot win, and no more.

Waves of blocks go through the card one after the other. A wave takes what memory needs for its bytes, or, if that is more, the time that
a block waits: once for all that it asks for at once, as often as it asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..compile.occupancy import occupancy
from ..spec.kernel import Arch, KernelSpec

LATENCY_US = 0.9  # from a load to its use, under load; an H200's
REGISTERS = 64  # of a thread, before ptxas has said
SLACK = 1.5  # a variant that should take this much longer than the best is not tried


@dataclass(frozen=True, slots=True)
class Card:
    """What the model knows of a GPU."""

    arch: Arch
    sms: int
    tbs: float  # of memory, read plus written


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant at one size. registers and shared: of the cubin, if it is there; a launch asks for the spec's dynamic_bytes besides."""

    spec: KernelSpec
    grid: int
    registers: int = REGISTERS
    shared: int = 0

    def resident(self, card: Card) -> int:
        """Blocks that the card holds at once."""
        shared = self.shared + self.spec.dynamic_bytes
        return card.sms * occupancy(card.arch, self.spec.threads_per_block, self.registers, shared).blocks_per_sm

    def expected_us(self, card: Card) -> float | None:
        """None where the model has no opinion."""
        if self.spec.traffic is None:
            return None
        block, at_once = self.spec.traffic
        resident = self.resident(card)
        if not resident:
            return float("inf")
        waits = -(-block // at_once) * LATENCY_US
        whole, rest = divmod(self.grid, resident)
        return sum(max(waits, 2 * blocks * block / card.tbs / 1e6) for blocks in (*[resident] * whole, *([rest] if rest else [])))


def promising(candidates: Sequence[Candidate], card: Card, most: int, near: KernelSpec) -> list[Candidate]:
    """The candidates that may win, at most so many, those first that differ least from a known good variant; all where the model has no
    opinion. The model is too coarse to rank what it lets through."""
    expected = {c: us for c in candidates if (us := c.expected_us(card)) is not None}
    if len(expected) < len({*candidates}):
        return list(candidates)
    limit = SLACK * min(expected.values(), default=0.0)
    return sorted((c for c in candidates if expected[c] <= limit), key=lambda c: (_apart(c.spec, near), expected[c], str(c.spec)))[:most]


def _apart(a: KernelSpec, b: KernelSpec) -> int:
    """Choices in which two variants of a problem differ."""
    return sum(getattr(a, f.name) != getattr(b, f.name) for f in fields(a))
