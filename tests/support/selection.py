"""Selects the parametrised cases that always run; the others run with `-m matrix`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


def kept(values: Iterable[Any], keep: Callable[[Any], bool]) -> list[Any]:
    """Parameters: the kept ones always run, the others with `-m matrix`."""
    return [value if keep(value) else _of_matrix(value) for value in values]


def few(values: Iterable[Any], most: int = 3) -> list[Any]:
    """Parameters: up to `most` run always, and at most half; the others with `-m matrix`. Chosen at even distances from the first one on,
    because neighbours in lists of cases differ least."""
    values = list(values)
    count = min(most, -(-len(values) // 2))
    always = {i * len(values) // count for i in range(count)}
    return [value if i in always else _of_matrix(value) for i, value in enumerate(values)]


def covering(cases: Iterable[Any], features: Callable[[Any], set[Any]]) -> list[Any]:
    """The cases that show a feature which none before them has."""
    seen: set[Any] = set()
    chosen = []
    for case in cases:
        if new := features(case) - seen:
            chosen.append(case)
            seen |= new
    return chosen


def costly(always: int, matrix: int | None = None) -> pytest.MarkDecorator:
    """Marks a test function: `always` of its parameter sets run always, and the others with `-m matrix`. `chosen` says which these are.

    matrix: a limit on the others. Use it for products of parameters whose every value occurs in the sets that run.
    """
    return pytest.mark.costly(always, matrix)


def thin(items: list[pytest.Item]) -> set[pytest.Item]:
    """Marks tests of `costly` functions and returns the tests that must not run."""
    functions: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("costly"):
            functions.setdefault((item.path, item.originalname), []).append(item)
    gone: set[pytest.Item] = set()
    for (_, name), tests in functions.items():
        mark = tests[0].get_closest_marker("costly")
        assert mark
        always, matrix = mark.args
        usual = [test for test in tests if not test.get_closest_marker("matrix")]
        first = chosen(usual, always, name)
        rest = [test for test in tests if test not in first]
        more = rest if matrix is None else chosen(rest, matrix, name)
        for test in more:
            test.add_marker("matrix")
        gone |= {test for test in rest if test not in more}
    return gone


def chosen(tests: Sequence[pytest.Function], count: int, name: str) -> list[pytest.Function]:
    """Up to `count` tests: each has the most parameter values that no earlier one has; among equals, it is the farthest from earlier ones.
    The first depends on the function's name, so that the functions of a file begin at different values."""
    values = [frozenset(test.callspec.indices.items()) for test in tests]
    start = zlib.crc32(name.encode()) % max(1, len(tests))
    left = [*range(start, len(tests)), *range(start)]
    seen, found = set[tuple[str, int]](), list[int]()
    distance = [len(tests)] * len(tests)  # to the nearest of `found`

    while left and len(found) < count:
        best = max(left, key=lambda i: (len(values[i] - seen), distance[i]))
        left.remove(best)
        found.append(best)
        seen |= values[best]
        distance = [min(d, abs(i - best)) for i, d in enumerate(distance)]
    return [tests[i] for i in sorted(found)]


def _of_matrix(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.matrix)
