"""What is tuned of linear attention: models' decode steps, or the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from ...models import Model
from ...tune.cases import Case, case_of, part_of, pool_of, states_of, users
from . import TIMED, bench
from .bench_recurrences import OPS


def cases(operator: str, given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    shapes = [(m.name, m.nheads, m.key_heads, m.dim_v, m.dim_k, states_of(m)) for m in given or users(operator)]
    if not shapes:
        heads, key_heads, dim = bench.shape(operator, None, None, None)
        shapes = [(f"{heads} x {dim} x {dim}", heads, key_heads, dim, dim, [OPS[operator].state])]
    for name, heads, key_heads, V, K, states in shapes:
        for state in states:
            pool = pool_of((heads, V, K), state, batches, bench.POOL_BYTES, device)
            for T, batch in product(tokens, batches):
                case = bench.Case(operator, part_of(pool, bench.POOL_BYTES, batch), key_heads, batch, T, T > 1)
                yield case_of(f"{operator} {name} {state.value} T {T} batch {batch}", case)


TUNING = {operator: partial(cases, operator) for operator in TIMED}
