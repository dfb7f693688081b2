"""Tuning cases of gated_rms_norm: models' norms, or the benchmark's shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...select.models import Model
from ...tune.cases import Case, case_of
from .bench import BENCH, FORMS, SHAPES, Form


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    of_models = [(FORMS[m.kind], m.norm_shape) for m in given]
    shapes = of_models or [(form, shape) for form in Form for shape in SHAPES[form]]
    for (form, shape), rows in product(dict.fromkeys(shapes), batches):
        yield case_of(f"norm, {form.value} {rows} x {shape}", BENCH.case(device, form=form, shape=shape, rows=rows, hot=False))


TUNING = {"gated_rms_norm": cases}
