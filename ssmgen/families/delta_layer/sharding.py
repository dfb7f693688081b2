"""The axes of gdn_layer's and kda_layer's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.layers.sharding import rule_of, sizes
from .operands import FUNCTIONS


def _kinds(given: Mapping[str, Any]) -> dict[str, str]:
    if (found := sizes(given)) is None:
        return {}
    heads, *inner, groups = found
    keys, values = inner if given.get("state_layout") == "kv" else inner[::-1]
    return {"channels": f"group:{groups}x{keys}+group:{groups}x{keys}+head:{heads}x{values}"}


RULES = {name: rule_of(operands, "mixed_qkv", _kinds) for name, operands in FUNCTIONS.items()}
