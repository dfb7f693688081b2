"""What is tuned of decode layers, whatever their recurrence: models' layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ..bench import layers
from ..models import Model
from .cases import Case, case_of, part_of, pool_of, states_of, users


def cases(operator: str, given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    """The decode steps of whole layers that the public function `operator` does."""
    for model in given or users(operator):
        rows, elements, _ = model.shape
        for state in states_of(model):
            pool = pool_of((model.nheads, rows, elements), state, batches, layers.POOL_BYTES, device)
            for batch, count in product(batches, tokens):
                case = layers.case_of(operator, model, part_of(pool, layers.POOL_BYTES, batch), batch, count, count > 1)
                several = f" T {count}" if count > 1 else ""
                yield case_of(f"{operator} {model.name} {state.value}{several} batch {batch}", case)
