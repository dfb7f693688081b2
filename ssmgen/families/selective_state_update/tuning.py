"""Tuning cases of selective_state_update: models' decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ...select.models import Model
from ...tune.cases import Case, case_of, states_of, users
from .bench import BENCH


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    for model in given or users("selective_state_update"):
        mamba1 = model.kind == "mamba1"
        states, steps = ([model.state], [1]) if mamba1 else (states_of(model), tokens)
        for state, T, batch in product(states, steps, batches):
            case = BENCH.case(device, model=model, state=state, tokens=T, batch=batch)
            yield case_of(f"{model.name} {state.value} T {T} batch {batch}", case)


TUNING = {"selective_state_update": cases}
