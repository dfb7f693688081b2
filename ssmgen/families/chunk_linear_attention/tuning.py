"""Tuning cases of chunk_linear_attention: prompts of models, or the benchmark's with their own batches and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...bench.prompts import PROMPT
from ...select.models import Model
from ...tune.cases import Case, case_of
from .bench import BENCH, CASES, Form


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    asked: list[dict[str, Any]] = [
        {"form": Form(m.kind), "shape": (m.shape[2], m.nheads, batch, PROMPT), "head_k": m.shape[1], "head_v": m.shape[0]}
        for m in given
        for batch in batches
    ]
    for at in asked or [{"form": form, "shape": shape} for form, shape in CASES]:
        case = BENCH.case(device, **at)
        form, shape = case.at.form, case.at.shape
        yield case_of(f"{form.value} {shape} of {case.at.head_k} x {case.at.head_v}", case)


TUNING = {"chunk_linear_attention": cases}
