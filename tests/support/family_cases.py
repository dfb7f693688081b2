"""Loads the calls for tests that run on every family, from each family's file `tests/support/cases/<family>.py`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ssmgen.spec.family import records

CASES = Path(__file__).parent / "cases"


def cases(kind: str) -> dict[str, Any]:
    """The entries of one kind, of all families together.

    CALLS: {public name: makes the arguments by name of a small call on a device}; BENCH: {operator: options of its benchmark's `run`, two
    cases or more on CPU tensors}.
    """
    found: dict[str, Any] = {}
    for family in records():
        if (CASES / f"{family.name}.py").is_file():
            found |= getattr(importlib.import_module(f"cases.{family.name}"), kind)
    return found
