"""What is tuned of chunk_scan: prompts of Mamba-2 models, or the benchmark's shapes, whose batches and lengths are their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...bench.multiplied import PROMPT
from ...models import Model
from ...tune.cases import Case, case_of
from . import bench


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    asked = [((m.nheads, m.shape[2], batch, PROMPT), m.shape[:2]) for m in given for batch in batches]
    for shape, (headdim, d_state) in asked or [(shape, (64, 128)) for shape in bench.SHAPES]:
        yield case_of(f"scan {shape} of {headdim} x {d_state}", bench.Case(shape, headdim=headdim, d_state=d_state, device=device))


TUNING = {"chunk_scan": cases}
