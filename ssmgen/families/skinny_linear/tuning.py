"""The calls of skinny_linear that are tuned: the benchmark's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...select.models import Model
from ...tune.cases import Case, case_of
from .bench import BENCH, SHAPES


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    for shape, rows in product(SHAPES, (8, 16)):
        yield case_of(f"product of {rows} rows, {' x '.join(map(str, shape))}", BENCH.case(device, shape=shape, rows=rows))


TUNING = {"skinny_linear": cases}
