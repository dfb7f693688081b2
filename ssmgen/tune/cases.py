"""The calls that are tuned: each operator's benchmark, on rotating cold inputs, for the models that use it or for its default shapes.

A family's `tuning.py` makes them, `{operator: cases(given, batches, tokens, device)}`; `given` is a list of models, or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..bench import bench_of
from ..bench.case import Case as BenchCase
from ..calls.operator import Call, call_of
from ..errors import SsmgenError
from ..select.models import Model, find_model, models
from ..spec.family import parts
from ..spec.kernel import DType

BATCHES = (1, 8, 64, 256)


class Case(NamedTuple):
    """A call at one size, as `sets` calls that differ only in their operands' addresses."""

    label: str
    sets: int
    call: Callable[[int], Call]
    gate: Callable[[], Any]  # checks the variant served now against float64; raises SsmgenError


def cases(
    operator: str,
    names: Sequence[str] = (),
    batches: Sequence[int] = (),
    tokens: Sequence[int] = (),
    tp: int = 1,
    device: str = "cuda",
) -> Iterator[Case]:
    """Makes each case only when it is requested, so that its buffers are freed before the next one's. names: models; if empty, all models
    that use the operator, or the benchmark's shapes; tp: the number of ranks that share a model. Raises SsmgenError for a model that does
    not use it."""
    known = parts("tuning")
    if operator not in known:
        raise SsmgenError(f"{operator} is not tuned; expected one of {', '.join(known)}")
    given = [find_model(name).divided(tp) for name in names]
    if wrong := [m.name for m in given if not _uses(operator, m)]:
        raise SsmgenError(f"--model is {', '.join(wrong)}; expected models that {operator} decodes")
    yield from known[operator](given, batches or BATCHES, tokens or (1,), device)


def used(operator: str, names: Sequence[str]) -> bool:
    """Whether all of these models use the operator; true without models. Raises ModelError."""
    return all(_uses(operator, find_model(name)) for name in names)


def _uses(operator: str, model: Model) -> bool:
    return bench_of(operator).of_model(model, 1, True) is not None


def users(operator: str) -> list[Model]:
    """The models that use it."""
    return [model for model in models().values() if _uses(operator, model)]


def states_of(model: Model) -> list[DType]:
    """The model's own state dtype, and the dtype that serving engines use."""
    return list(dict.fromkeys((model.state, DType.BF16)))


def case_of(label: str, bench: BenchCase) -> Case:
    """A benchmark's case as a case to tune."""
    return Case(label, bench.sets, lambda i: call_of(bench.function, **bench.arguments(i), pdl=True), bench.gate)
