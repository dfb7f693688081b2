"""What is tuned of chunk_linear_attention: prompts of models, or the benchmark's, whose batches and lengths are their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...bench.prompts import PROMPT
from ...models import Model
from ...tune.cases import Case, case_of
from .bench import BENCH, CASES, Form


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    asked = [(Form(m.kind), (m.shape[2], m.nheads, batch, PROMPT), m.shape[1], m.shape[0]) for m in given for batch in batches]
    for form, shape, head_k, head_v in asked or [(form, shape, None, None) for form, shape in CASES]:
        case = BENCH.case(device, form=form, shape=shape, head_k=head_k, head_v=head_v)
        yield case_of(f"{form.value} {shape} of {case.at.head_k} x {case.at.head_v}", case)


TUNING = {"chunk_linear_attention": cases}
