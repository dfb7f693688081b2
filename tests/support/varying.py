"""Cases by name: some that differ a little from another one, and one test for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest


def named(*several: Any) -> pytest.MarkDecorator:
    """One test for each case, under its id."""
    return pytest.mark.parametrize("case", several, ids=lambda c: c.id)


def vary(base: Any, **cases: dict[str, Any]) -> list[Any]:
    """Cases that differ from `base` as is said, under ids that say which."""
    return [replace(base, **({"id": f"{base.id}-{name}".replace("_", "-")} | changes)) for name, changes in cases.items()]
