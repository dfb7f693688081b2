"""What runs always, and what with the whole matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def kept(values: Iterable[Any], keep: Callable[[Any], bool]) -> list[Any]:
    """Parameters: those that are to be kept run always, the others with `-m matrix`."""
    return [value if keep(value) else pytest.param(value, marks=pytest.mark.matrix) for value in values]
