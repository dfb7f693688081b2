"""What is tuned of combine_splits: the benchmark's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...calls.checks import TORCH_DTYPES
from ...models import Model
from ...spec import DType
from ...tune.cases import Case, case_of
from . import bench
from .bench import Form


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    for form, state, d_v in product((Form.DENSE, Form.PREFIX), (DType.F32, DType.BF16), (128, 512)):
        for shape in bench.SHAPES:
            case = bench.Case(shape, d_v, form, TORCH_DTYPES[state], device=device)
            yield case_of(f"combine, {form.value} {shape} d_v {d_v} {state.value}", case)


TUNING = {"combine_splits": cases}
