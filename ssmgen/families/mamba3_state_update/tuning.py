"""Tuning cases of mamba3_state_update: models' decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...select.models import Model
from ...tune.cases import Case, case_of, states_of, users
from .bench import BENCH


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    for model in given or users("mamba3_state_update"):
        for state, T, batch in product(states_of(model), tokens, batches):
            case = BENCH.case(device, model=model, state=state, tokens=T, batch=batch)
            yield case_of(f"{model.name} {state.value} T {T} batch {batch}", case)


TUNING = {"mamba3_state_update": cases}
