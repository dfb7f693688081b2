"""What is tuned of causal_conv1d_update: models' channels, or the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...models import Model
from ...spec import DType
from ...tune.cases import Case, case_of, part_of, pool_of
from . import bench


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    dims = dict.fromkeys(m.conv_channels for m in given) or {12288: None}
    for dim, innermost, T in product(dims, bench.Innermost, tokens):
        inner = (dim, 2 + T) if innermost is bench.Innermost.WINDOW else (2 + T, dim)
        pool = pool_of(inner, DType.BF16, batches, bench.POOL_BYTES, device)
        for batch in batches:
            case = bench.Case(part_of(pool, bench.POOL_BYTES, batch), innermost, batch, T)
            yield case_of(f"convolution of {dim} channels, {innermost.value} T {T} batch {batch}", case)


TUNING = {"causal_conv1d_update": cases}
