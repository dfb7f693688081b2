"""What is tuned of replay: steps of models' shapes, or the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from ...calls.checks import TORCH_DTYPES
from ...models import Model
from ...spec import DType
from ...tune.cases import Case, case_of
from . import bench
from .bench_case import PLAIN, SHAPE
from .bench_case import Case as Step


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    shapes = [(m.nheads, m.headdim, m.d_state, m.ngroups) for m in given] or [SHAPE]
    for shape, state, window, batch in product(shapes, (DType.BF16, DType.F32), bench.WINDOWS, batches):
        case = Step(batch, window=window, shape=shape, dtype=TORCH_DTYPES[state], device=device)
        label = f"replay {' x '.join(map(str, shape))} {state.value} window {window} batch {batch}"
        yield case_of(label, case, partial(case.gate, PLAIN))


TUNING = {"replay_selective_state_update": cases}
