"""Tuning cases of causal_conv1d_update: models' channels, or the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...select.models import Model
from ...tune.cases import Case, case_of
from .bench import BENCH, Innermost


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    dims = dict.fromkeys(m.conv_channels for m in given) or {12288: None}
    for dim, layout, T, batch in product(dims, Innermost, tokens, batches):
        case = BENCH.case(device, layout=layout, tokens=T, batch=batch, dim=dim)
        yield case_of(f"convolution of {dim} channels, {layout.value} T {T} batch {batch}", case)


TUNING = {"causal_conv1d_update": cases}
