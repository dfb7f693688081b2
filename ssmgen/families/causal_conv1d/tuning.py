"""Tuning cases of causal_conv1d: models' prompts, or the benchmark's shapes with their own batches and lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...bench.prompts import PROMPT
from ...select.models import Model
from ...tune.cases import Case, case_of
from .bench import BENCH, SHAPES
from .spec import ConvLayout


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    shapes = [(batch, m.conv_channels, PROMPT) for m in given for batch in batches] or SHAPES
    for layout, shape in product(ConvLayout, shapes):
        yield case_of(f"convolution, {layout.value} {shape}", BENCH.case(device, layout=layout, shape=shape))


TUNING = {"causal_conv1d": cases}
