"""What is tuned of selective_state_update: models' decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from ...calls.operator import Call, call_of
from ...models import Model
from ...tune.cases import Case, part_of, pool_of, states_of, users
from . import bench
from .call import selective_state_update


def cases(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    for model in given or users("selective_state_update"):
        mamba1 = model.kind == "mamba1"
        shape = (model.headdim, model.d_state) if mamba1 else (model.nheads, model.headdim, model.d_state)
        for state in [model.state] if mamba1 else states_of(model):
            pool = pool_of(shape, state, batches, bench.POOL_BYTES, device)
            for T, batch in product([1] if mamba1 else tokens, batches):
                case = bench.Case(model, part_of(pool, bench.POOL_BYTES, batch), batch, T, T > 1)
                yield Case(f"{model.name} {state.value} T {T} batch {batch}", case.sets, partial(_call, case), case.gate)


def _call(case: bench.Case, i: int) -> Call:
    args, kwargs = case.arguments(i)
    return call_of(selective_state_update, *args, **kwargs, pdl=True)


TUNING = {"selective_state_update": cases}
