"""What is tuned of chunk_linear_attention: prompts of models, or the benchmark's, whose batches and lengths are their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...bench.multiplied import PROMPT
from ...models import Model
from ...tune.cases import Case, case_of
from . import bench


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    asked = [(bench.form_of(m), (m.shape[2], m.nheads, batch, PROMPT), m.shape[1], m.shape[0]) for m in given for batch in batches]
    for form, shape, head_k, head_v in asked or bench.ROWS:
        yield case_of(f"{form.value} {shape} of {head_k} x {head_v}", bench.Case(shape, form, head_k, head_v, device))


TUNING = {"chunk_linear_attention": cases}
