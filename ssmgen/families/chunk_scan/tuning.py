"""Tuning cases of chunk_scan: prompts of models, or the benchmark's shapes with their own batches and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...bench.prompts import PROMPT
from ...select.models import Model
from ...tune.cases import Case, case_of
from .bench import BENCH, FORMS, SHAPES, Form


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    asked = [((m.nheads, m.shape[2], batch, PROMPT), m.shape[:2], FORMS[m.kind]) for m in given for batch in batches]
    for shape, (headdim, d_state), form in asked or [(shape, (64, 128), Form.BATCH) for shape in SHAPES]:
        case = BENCH.case(device, form=form, shape=shape, headdim=headdim, d_state=d_state)
        yield case_of(f"scan {shape} of {headdim} x {d_state}", case)


TUNING = {"chunk_scan": cases}
