"""Tuning cases of replay: steps of models' shapes, or the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...engine.recurrences.mamba.model import MambaModel
from ...select.models import Model
from ...spec.kernel import DType
from ...tune.cases import Case, case_of
from .bench import BENCH, SHAPE, WINDOWS


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    shapes = [(m.nheads, m.headdim, m.d_state, m.ngroups) for m in given if isinstance(m, MambaModel)] or [SHAPE]
    for shape, state, window, batch in product(shapes, (DType.BF16, DType.F32), WINDOWS, batches):
        label = f"replay {' x '.join(map(str, shape))} {state.value} window {window} batch {batch}"
        yield case_of(label, BENCH.case(device, state=state, window=window, batch=batch, shape=shape))


TUNING = {"replay_selective_state_update": cases}
