"""What runs always, and what with the whole matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def kept(values: Iterable[Any], keep: Callable[[Any], bool]) -> list[Any]:
    """Parameters: those that are to be kept run always, the others with `-m matrix`."""
    return [value if keep(value) else _of_matrix(value) for value in values]


def few(values: Iterable[Any], most: int = 3) -> list[Any]:
    """Parameters: up to `most` run always, and at most half; the others with `-m matrix`. Chosen at even distances from the first one on,
    as in lists of cases neighbours differ least."""
    values = list(values)
    count = min(most, -(-len(values) // 2))
    always = {i * len(values) // count for i in range(count)}
    return [value if i in always else _of_matrix(value) for i, value in enumerate(values)]


def _of_matrix(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.matrix)
