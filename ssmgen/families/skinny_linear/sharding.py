"""The sharding rule of skinny_linear: the rows of a weight are the heads of other functions, and so are the columns of its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calls.sharding import Rule
from .operands import LISTS, MOST

_ITEMS = tuple(map(str, range(MOST)))


def _axes(given: Mapping[str, Any]) -> dict[str, str]:
    """x and outputs have any number of axes of rows."""
    x: Any = given.get("x")
    lead = ["batch", *["row"] * x.dim()][: max(x.dim() - 1, 0)] if hasattr(x, "dim") else ["batch"]
    rows = " ".join([*lead, "head"])
    of = dict.fromkeys(LISTS, "head") | {"weight": "head k", "residual": rows, "out": rows}
    found = {f"{name}{item}": words for name, words in of.items() for item in ("", *[f".{i}" for i in _ITEMS])}
    return {**found, "x": " ".join([*lead, "k"]), "norm_weight": "k"}


RULES = {"skinny_linear": Rule(_axes({}), ("out",), anchors=("weight", "weight.0"), tuples=dict.fromkeys(LISTS, _ITEMS), variant=_axes)}
