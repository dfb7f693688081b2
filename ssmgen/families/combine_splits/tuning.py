"""Tuning cases of combine_splits: the benchmark's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...select.models import Model
from ...spec.kernel import DType
from ...tune.cases import Case, case_of
from .bench import BENCH, SHAPES, Form


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    for form, dtype, d_v, shape in product((Form.DENSE, Form.PREFIX), (DType.F32, DType.BF16), (128, 512), SHAPES):
        case = BENCH.case(device, form=form, dtype=dtype, d_v=d_v, shape=shape, hot=False)
        yield case_of(f"combine, {form.value} {shape} d_v {d_v} {dtype.value}", case)


TUNING = {"combine_splits": cases}
