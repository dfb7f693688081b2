"""Tuning cases of selective_scan: prompts of models, or the benchmark's shapes with their own batches and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...bench.prompts import PROMPT
from ...select.models import Model
from ...tune.cases import Case, case_of
from .bench import BENCH, SHAPES, Form


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    asked = [((m.shape[0], batch, PROMPT), m.shape[1]) for m in given for batch in batches]
    for (shape, d_state), form in product(asked or [(shape, 16) for shape in SHAPES], Form):
        case = BENCH.case(device, form=form, shape=shape, d_state=d_state)
        yield case_of(f"selective scan, {form.value} {shape} of {d_state} states", case)


TUNING = {"selective_scan": cases}
