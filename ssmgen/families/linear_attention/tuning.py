"""Tuning cases of linear attention: models' decode steps, or the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from ...select.models import Model
from ...tune.cases import Case, case_of, states_of, users
from . import TIMED
from .bench import BENCHES
from .models import LinearAttention


def cases(operator: str, given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    bench = BENCHES[operator]
    models = [model for model in given or users(operator) if isinstance(model, LinearAttention)]
    for model, T, batch in product(models, tokens, batches):
        sizes = {"heads": model.nheads, "key_heads": model.key_heads, "dim": model.dim_k, "value_dim": model.dim_v}
        for state in states_of(model):
            case = bench.case(device, state=state, tokens=T, batch=batch, **sizes)
            yield case_of(f"{operator} {model.name} {state.value} T {T} batch {batch}", case)
    for T, batch in () if models else product(tokens, batches):
        case = bench.case(device, tokens=T, batch=batch)
        yield case_of(f"{operator} {case.at.heads} x {case.at.dim} x {case.at.dim} {case.at.state.value} T {T} batch {batch}", case)


TUNING = {operator: partial(cases, operator) for operator in TIMED}
