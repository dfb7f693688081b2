"""The axes of mamba2_layer's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.layers.sharding import rule_of, sizes
from .operands import OPERANDS


def _kinds(given: Mapping[str, Any]) -> dict[str, str]:
    if (found := sizes(given)) is None:
        return {}
    H, P, N, G = found
    axes = {"channels": f"head:{H}x{P}+group:{G}x{N}+group:{G}x{N}"}
    weight: Any = given.get("norm_weight")
    if hasattr(weight, "shape"):  # for the channels that are normed together
        size = given.get("norm_group_size") or H * P
        axes["norm_weight"] = f"{'head' if weight.shape == (H * P,) else 'row'}/{max(size // max(P, 1), 1)}"
    return axes


RULES = {"mamba2_layer": rule_of(OPERANDS, "xBC", _kinds)}
