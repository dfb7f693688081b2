"""A cost model of variants, just good enough to leave out variants that cannot win.

Blocks run in waves, one wave after the other. The time of a wave is the larger of two: the memory time for its bytes, and a block's
waiting time, which is one latency for each batch of loads that it has in flight at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..compile.occupancy import occupancy
from ..spec.kernel import Arch, KernelSpec

LATENCY_US = 0.9  # from a load to its use, under load; measured on an H200
REGISTERS = 64  # per thread, until ptxas has reported them
SLACK = 1.5  # a variant with more than this factor of the best one's expected time is not tried


@dataclass(frozen=True, slots=True)
class Card:
    """The properties of a GPU in the model."""

    arch: Arch
    sms: int
    tbs: float  # of memory, read plus written


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant at one size. registers and shared: from the cubin, if compiled; a launch also needs the spec's dynamic_bytes."""

    spec: KernelSpec
    grid: int
    registers: int = REGISTERS
    shared: int = 0

    def resident(self, card: Card) -> int:
        """Blocks that fit on the card at once."""
        shared = self.shared + self.spec.dynamic_bytes
        return card.sms * occupancy(card.arch, self.spec.threads_per_block, self.registers, shared).blocks_per_sm

    def expected_us(self, card: Card) -> float | None:
        """The expected time; None if the model does not apply."""
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
    """At most `most` candidates that may win, in order of their distance from a known good variant. All candidates if the model does not
    apply to one of them. The model is too coarse to rank the candidates that it keeps."""
    expected = {c: us for c in candidates if (us := c.expected_us(card)) is not None}
    if len(expected) < len({*candidates}):
        return list(candidates)
    limit = SLACK * min(expected.values(), default=0.0)
    return sorted((c for c in candidates if expected[c] <= limit), key=lambda c: (_apart(c.spec, near), expected[c], str(c.spec)))[:most]


def _apart(a: KernelSpec, b: KernelSpec) -> int:
    """The number of choices in which two variants of a problem differ."""
    return sum(getattr(a, f.name) != getattr(b, f.name) for f in fields(a))
