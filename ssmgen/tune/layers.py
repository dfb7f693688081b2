"""The calls of decode layers that are tuned, for any recurrence: the layers of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from ..bench import bench_of
from ..select.models import Model
from .cases import Case, case_of, states_of, users

_FORMS: dict[str, dict[str, Any]] = {
    "kept": {"intermediates": True},
    "by slot": {"by_slot": True},
}  # the calls of layers that verify drafts


def cases(operator: str, given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    """The decode steps of whole layers for the public function `operator`."""
    for model in given or users(operator):
        for state, batch, count in product(states_of(model), batches, tokens):
            for form, how in _FORMS.items() if count > 1 else [("", {})]:
                case = bench_of(operator).case(device, model=model, state=state, batch=batch, tokens=count, **how)
                yield case_of(f"{operator} {model.name} {state.value}{form and f' T {count} {form}'} batch {batch}", case)
