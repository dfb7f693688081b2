"""Tuning cases of mamba3_chunk_scan: models' prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...bench.prompts import PROMPT
from ...select.models import Model, find_model
from ...tune.cases import Case, case_of
from .bench import BENCH, DEFAULTS


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    for model in given or map(find_model, DEFAULTS):
        for batch in batches:
            case = BENCH.case(device, model=model, shape=(batch, PROMPT))
            yield case_of(f"{model.name} {batch} x {PROMPT}", case)


TUNING = {"mamba3_chunk_scan": cases}
