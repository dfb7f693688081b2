"""The calls of token_shift that are tuned: the benchmark's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...select.models import Model
from ...tune.cases import Case, case_of
from .bench import BENCH, DIMS


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    for dim, batch in product(DIMS, batches):
        yield case_of(f"token_shift, dim {dim} batch {batch}", BENCH.case(device, dim=dim, batch=batch))


TUNING = {"token_shift": cases}
