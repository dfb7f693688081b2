"""The axes of selective_scan's tensors are: channels are what others call heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.chunks.sharding import rule_of
from .operands import KEYS, OPERANDS, ROWS


def _per_token(given: Mapping[str, Any]) -> dict[str, str]:
    """Axes of what has tokens: whether channels come first is an option, and whether there are groups the number of axes."""
    u, first = given["u"], given.get("channels_first", False)
    batch = "batch " if u.dim() == 3 else ""
    rows, groups, keys = ("head token", "group n token", "n token") if first else ("token head", "token group n", "token n")
    return {
        **dict.fromkeys(ROWS, batch + rows),
        **{name: batch + (groups if name in given and given[name].dim() > u.dim() else keys) for name in KEYS},
    }


RULES = {"selective_scan": rule_of(OPERANDS, "u", variant=_per_token)}
