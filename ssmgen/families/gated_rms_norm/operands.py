"""The tensors that each norm takes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...calls.sharding import Rule
from ...engine.norm_operands import OPERANDS, SHARED

__all__ = ["FUNCTIONS", "OPERANDS", "SHARED"]

FUNCTIONS = {
    "gated_rms_norm": OPERANDS.only("x", "gate", "weight", "out"),
    "gated_layer_norm": OPERANDS.only("x", "gate", "weight", "bias", "out"),
    "rms_norm": OPERANDS.only("x", "residual", "weight", "out", "residual_out"),
}

# How a mesh of devices may divide them. Groups of channels are the heads of other functions.
_LIKE_X = tuple([name for name in OPERANDS.names if name not in SHARED])


def _groups(given: Mapping[str, Any]) -> dict[str, str]:
    """Groups are the second last axis, or with group_size neighbours in the last axis."""
    x, size = given["x"], given.get("group_size")
    if not hasattr(x, "dim"):
        return {}
    inner = [f"head/{size}"] if size else ["head", "n"] if x.dim() > 2 else ["n"]
    ahead = ["batch", *["row"] * x.dim()][: max(x.dim() - len(inner), 0)]
    found = dict.fromkeys(_LIKE_X, " ".join([*ahead, *inner]))
    for name in ("weight", "bias"):
        t: Any = given.get(name)
        if hasattr(t, "dim") and t.dim():
            shared = t.shape[0] == (size or x.shape[-1])
            found[name] = "head n" if t.dim() == 2 else "n" if shared else inner[0]
    return found


_rule = partial(Rule, {**dict.fromkeys(_LIKE_X, "batch n"), **dict.fromkeys(("weight", "bias"), "n")}, anchors=("x",), variant=_groups)
RULES = {
    "gated_rms_norm": _rule(("out",)),
    "gated_layer_norm": _rule(("out",)),
    "rms_norm": _rule(("out", "residual_out"), returns=("out", "residual_out")),
}
