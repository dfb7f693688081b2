"""The tensors of decode_attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calls.sharding import Rule
from ...spec.operands import Operand, Types, table

_QUERY: dict[str, Any] = {"view": "batch head d", "strides": "batch:64 head"}
_CACHE: dict[str, Any] = {"field": "cache", "written": True, "strides": "batch:64 head:64 key"}
OPERANDS = table(
    Operand("q", "batch q_head d", field="x", **_QUERY),
    Operand("k", "batch head d", field="x", strides="batch:64 head"),
    Operand("v", "batch head d", field="x", strides="batch:64 head"),
    Operand("key_cache", "batch head key d", **_CACHE, note="row position[b] only"),
    Operand("value_cache", "batch head key d", **_CACHE, note="row position[b] only"),
    Operand("position", "batch", Types.I64, strides="batch:64", note="number of keys before the token"),
    Operand("cos", "batch r | 1 r", optional=True, field="angles", strides="batch:64", note="with sin"),
    Operand("sin", "batch r | 1 r", optional=True, field="angles", strides="batch:64", note="with cos"),
    Operand("q_norm", "d", optional=True, field="norm", note="with k_norm"),
    Operand("k_norm", "d", optional=True, field="norm", note="with q_norm"),
    Operand("gate", "batch q_head d", optional=True, **_QUERY),
    Operand("out", "batch q_head d", field="x", written=True, **_QUERY),
    q_head="q_heads", head="kv_heads", key="room", d="head_dim", r="rotary_dim",
)  # fmt: skip


# How a mesh of devices may divide them: the query heads of a key head stay together.
def _angles(given: Mapping[str, Any]) -> dict[str, str]:
    """One row of cosines for all sequences is not divided."""
    both: dict[str, Any] = {name: given.get(name) for name in ("cos", "sin")}
    shared = [name for name, t in both.items() if hasattr(t, "dim") and t.dim() == 2 and t.shape[0] == 1]
    return dict.fromkeys(shared, "one n")


RULES = {
    "decode_attention": Rule(
        {
            **dict.fromkeys(("q", "gate", "out"), "batch head n"),
            **dict.fromkeys(("k", "v"), "batch group n"),
            **dict.fromkeys(("key_cache", "value_cache"), "batch group key n"),
            **dict.fromkeys(("cos", "sin"), "batch n"),
            **dict.fromkeys(("q_norm", "k_norm"), "n"),
            "position": "batch",
        },
        OPERANDS.written,
        anchors=("q",),
        variant=_angles,
    )
}
