"""Tuning cases of chunk_delta_rule: prompts of models, or the benchmark's shapes with their own batches and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...bench.prompts import PROMPT
from ...select.models import Model
from ...tune.cases import Case, case_of
from .bench import BENCH, SHAPES, Form


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    asked = [((m.shape[2], m.nheads, batch, PROMPT), (m.shape[1], m.shape[0])) for m in given for batch in batches]
    for shape, (head_k, head_v) in asked or [(shape, (128, 128)) for shape in SHAPES]:
        case = BENCH.case(device, form=Form.BATCH, shape=shape, head_k=head_k, head_v=head_v)
        yield case_of(f"delta {shape} of {head_k} x {head_v}", case)


TUNING = {"chunk_delta_rule": cases}
