"""Estimated times of warps with roles, when several blocks share a sequence of a head: in spans or in parts (roles.py).

CHUNK_US and LEAD come from an H200, JOIN_US is an estimate. A chunk without outputs needs neither q nor M. LEAD places the cuts of spans;
the benchmark and tuning take the number of parts from `estimated`.
"""

from __future__ import annotations

from typing import NamedTuple

CHUNK_US = 3.6  # 2048 tokens of SISO are 32 chunks in 117.5 us, 8192 tokens 128 chunks in 450 us; 2048 tokens of four ranks 128 in 455 us
LEAD = 0.70  # the share of a chunk's time that its state takes: two spans took 0.771 = 1 / (2 - LEAD) of the whole sequence's time
JOIN_US = 3.0  # estimated: two barriers of a cluster, and loads of the other blocks' states
MOST_SPANS = 4


class Shares(NamedTuple):
    """How blocks share a sequence of a head, and the estimated time of a call."""

    spans: int
    parts: int
    us: float


def span_starts(spans: int, lead: float = LEAD) -> list[float]:
    """The beginning of each span, as a share of the sequence. All blocks take the same time: `lead` for a chunk before the span, 1 within
    it."""
    rest = 1 - lead
    return [(1 - rest**place) / (1 - rest**spans) for place in range(spans)]


def spans_us(chunks: int, spans: int) -> float:
    """One block's time for its span and the chunks before it. The limit for many spans is LEAD of a whole sequence's time."""
    return float(CHUNK_US * chunks * LEAD / (1 - (1 - LEAD) ** spans))


def parts_us(chunks: int, parts: int) -> float:
    """One block's time for its part: the state that it leaves, the join, and its outputs."""
    return CHUNK_US * -(-chunks // parts) * (1 + LEAD) + JOIN_US if parts > 1 else CHUNK_US * chunks


def estimated(heads: int, sequences: int, chunks: int, sms: int, most_parts: int = 1) -> list[Shares]:
    """All ways to share sequences of `chunks` chunks on a card of `sms` SMs, the fastest one first. An SM runs one block at a time, and the
    blocks of a cluster start together. most_parts: a call's `segments`; up to 2 keep the bits of whole sequences."""

    def turns(blocks: int) -> int:  # of the card, with this number of blocks for a sequence of a head
        return -(-heads * sequences // (sms // blocks))

    found = [Shares(n, 1, turns(n) * spans_us(chunks, n)) for n in range(1, min(MOST_SPANS, sms) + 1)]
    found += [Shares(1, n, turns(n) * parts_us(chunks, n)) for n in range(2, min(most_parts, chunks, sms) + 1)]
    return sorted(found, key=lambda way: way.us)
