"""Measurement: what `ssmgen bench` runs. A number comes with its peers and its ceiling, taken in the same run, or not at all.

A benchmark is a module of its family. It has `run`, which makes a report; `REPORT`, what that holds; `table`, the report as text; `point`,
which says in words what a row of the report is about; `OPTIONS` of its command, which are arguments of `run`; `QUICK`, what is left of them
with --quick; `of_model`, what they are for a model, or None for one that does not use the operator; and, where options may contradict each
other, `mistakes`. In a module that times several operators, `run` and `of_model` take the operator's name, `op`.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from ..family import Family, records


@functools.cache
def benchmarks() -> dict[str, tuple[Family, str]]:
    """{operator that has a benchmark: (its family, place of the module)}"""
    return {op: (family, place) for family in records() for op, place in family.bench.items()}


def bench_of(op: str) -> ModuleType:
    """The module that times an operator. Raises KeyError."""
    family, place = benchmarks()[op]
    module: ModuleType = family.part(place)
    return module


def told(op: str) -> dict[str, Any]:
    """The argument that tells a module which operator to time, where it times several."""
    return {"op": op} if "op" in inspect.signature(bench_of(op).of_model).parameters else {}
