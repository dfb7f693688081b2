"""The axes of selective_scan's tensors are: its channels are the heads of other functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.chunks.sharding import rule_of
from .operands import KEYS, OPERANDS, ROWS


def _per_token(given: Mapping[str, Any]) -> dict[str, str]:
    """Axes of tensors with tokens: an option tells whether channels come first, the number of axes whether there are groups."""
    u, first = given["u"], given.get("channels_first", False)
    batch = "batch " if u.dim() == 3 else ""
    rows, groups, keys = ("head token", "group n token", "n token") if first else ("token head", "token group n", "token n")
    return {
        **dict.fromkeys(ROWS, batch + rows),
        **{name: batch + (groups if name in given and given[name].dim() > u.dim() else keys) for name in KEYS},
    }


RULES = {"selective_scan": rule_of(OPERANDS, "u", variant=_per_token)}
