"""What the axes of gdn_layer's and kda_layer's tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.layer_sharding import rule_of, sizes


def _kinds(given: Mapping[str, Any]) -> dict[str, str]:
    if (found := sizes(given)) is None:
        return {}
    heads, *inner, groups = found
    keys, values = inner if given.get("state_layout") == "kv" else inner[::-1]
    return {"channels": f"group:{groups}x{keys}+group:{groups}x{keys}+head:{heads}x{values}"}


_SHARED = {"A_log": "head", "norm_weight": "row"}
RULES = {
    "gdn_layer": rule_of("mixed_qkv", _SHARED | {"a": "* head", "b": "* head", "dt_bias": "head"}, _kinds),
    "kda_layer": rule_of("mixed_qkv", _SHARED | {"g": "* head|* head key", "beta": "* head", "dt_bias": "head|head key"}, _kinds),
}
