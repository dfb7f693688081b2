"""The calls that are tuned: each operator's benchmark, on rotating cold inputs, for the models that use it or for its default shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..bench import bench_of, benchmarks
from ..bench.axes import At, uses
from ..bench.case import Case as BenchCase
from ..calls.operator import Call, call_of
from ..errors import SsmgenError
from ..select.models import find_model

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
    if operator not in benchmarks():
        raise SsmgenError(f"{operator} is not tuned; expected one of {', '.join(benchmarks())}")
    given, bench = [find_model(name).divided(tp) for name in names], bench_of(operator)
    if wrong := [m.name for m in given if not uses(operator, m)]:
        raise SsmgenError(f"--model is {', '.join(wrong)}; expected models that {operator} decodes")
    for values in bench.tuned(given, batches or BATCHES, tokens or (1,)):
        yield _case(bench.case(device, **values), bench.label)


def used(operator: str, names: Sequence[str]) -> bool:
    """Whether all of these models use the operator; true without models. Raises ModelError."""
    return all(uses(operator, find_model(name)) for name in names)


def _case(of: BenchCase, label: Callable[[At], str]) -> Case:
    return Case(label(of.at), of.sets, lambda i: call_of(of.function, **of.arguments(i), pdl=True), of.gate)
