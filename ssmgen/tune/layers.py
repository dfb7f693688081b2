"""What is tuned of decode layers, whatever their recurrence: models' layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from ..bench import layers
from ..models import Model
from .cases import Case, case_of, part_of, pool_of, states_of, users

_FORMS = {"kept": {"intermediates": True}, "by slot": {"by_slot": True}}  # of several tokens: what is asked of layers that verify drafts


def cases(operator: str, given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    """The decode steps of whole layers that the public function `operator` does."""
    for model in given or users(operator):
        rows, elements, _ = model.shape
        for state in states_of(model):
            pool = pool_of((model.nheads, rows, elements), state, [max(batches) * max(tokens)], layers.POOL_BYTES, device)
            for batch, count in product(batches, tokens):
                for form, how in _FORMS.items() if count > 1 else [("", {})]:
                    part = part_of(pool, layers.POOL_BYTES, batch * (count if how.get("by_slot") else 1))
                    case = layers.case_of(operator, model, part, batch, count, **how)
                    yield case_of(f"{operator} {model.name} {state.value}{form and f' T {count} {form}'} batch {batch}", case)
