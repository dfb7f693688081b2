"""What runs always, and what with the whole matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def kept(values: Iterable[Any], keep: Callable[[Any], bool]) -> list[Any]:
    """Parameters: those that are to be kept run always, the others with `-m matrix`."""
    return [value if keep(value) else _of_matrix(value) for value in values]


def every_other(values: Iterable[Any]) -> list[Any]:
    """Parameters of which every second runs always: in lists of cases, neighbours differ least."""
    return [_of_matrix(value) if i % 2 else value for i, value in enumerate(values)]


def _of_matrix(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.matrix)
