"""The axes of the tensors of mamba3_state_update and mamba3_layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calls.sharding import Rule
from .operands import OPERANDS
from .row import PARTS, sizes_of


def _channels(given: Mapping[str, Any]) -> dict[str, str]:
    """The channels of a projected row: by head, by group for each rank, and the angles, which all heads share."""
    found = sizes_of(*[given.get(name) for name in ("state", "k_state", "angle_state")])
    projected: Any = given.get("projected")
    if found is None or not getattr(projected, "ndim", 0) or (groups := found.groups(projected.shape[-1])) is None:
        return {}  # the call's checks report it
    rows = [f"head:{found.heads}x{found.headdim}"] * 2 + [f"group:{groups}x{found.d_state}"] * (2 * found.rank)
    return {"projected": f"* {'+'.join([*rows, *[f'head:{found.heads}x1'] * 3, f'group:1x{found.angles}'])}"}


_AXES = OPERANDS.axes()
_OF_LAYER = {name: axes for name, axes in _AXES.items() if name not in PARTS} | {"projected": "* channels", "norm_weight": "head"}
RULES = {
    "mamba3_state_update": Rule(_AXES, OPERANDS.written, "x"),
    "mamba3_layer": Rule(_OF_LAYER, OPERANDS.written, "projected", inner=1, variant=_channels),
}
