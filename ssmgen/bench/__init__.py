"""The measurements of `ssmgen bench`. A number comes with its peers and its ceiling, taken in the same run, or not at all.

A family's `bench.py` declares its benchmarks, each a `Bench` of `engine.py`. It names what varies (`axes.py`), the inputs of a case and
the part of a call that is held against float64 (`case.py`), the peers, and the words for a case. The engine runs it. `rows.py` makes rows
of one kind from all reports, which `table.py`, `html.py` and `formats.py` show.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..spec.family import Family, records

if TYPE_CHECKING:
    from .engine import Bench


@functools.cache
def benchmarks() -> dict[str, tuple[Family, str]]:
    """{operator that has a benchmark: (its family, place of its Bench, or of several by operator)}"""
    return {op: (family, place) for family in records() for op, place in family.bench.items()}


def bench_of(op: str) -> Bench:
    """The benchmark of an operator. Raises KeyError."""
    family, place = benchmarks()[op]
    found = family.part(place)
    bench: Bench = found[op] if isinstance(found, dict) else found
    return bench
