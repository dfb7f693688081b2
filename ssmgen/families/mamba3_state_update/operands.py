"""The tensors of Mamba-3's decode step. `head` and `row` are heads and headdim, `n` is d_state, `rank` is 1 for SISO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...calls.sharding import Rule
from ...spec.operands import Operand, Types, table
from .row import PARTS, sizes_of

LEAD = "batch token?several"  # strides of an operand of tokens
OPERANDS = table(
    Operand("state", "slot head row n", written=True, strides="slot:64"),
    Operand("k_state", "slot rank head n | slot head n", written=True, strides="slot:64 rank?loose head?loose", note="of the last token"),
    Operand("v_state", "slot head row", written=True, strides="slot:64 head?loose", note="of the last token"),
    Operand(
        "angle_state", "slot head angle", Types.F32, optional=True, written=True, there="rotates", strides="slot:64 head?loose",
        note="radians; None: no rotation",
    ),
    Operand("x", "token head row", strides=f"{LEAD} head?loose row?loose"),
    Operand("B", "token rank group n | token group n", strides=f"{LEAD} rank?loose group?loose n?loose"),
    Operand("C", "like B", field="B", note="of B's type"),
    Operand("dt", "token head", strides=f"{LEAD} head?loose"),
    Operand("A", "token head", strides=f"{LEAD} head?loose"),
    Operand("trap", "token head", strides=f"{LEAD} head?loose"),
    Operand("angle", "token head angle | token angle", optional=True, strides=f"{LEAD} head angle?loose", note="logits; with angle_state"),
    Operand("D", "head", optional=True, strides="head?loose"),
    Operand("z", "like x", optional=True, note="None: no gate"),
    Operand("dt_bias", "head", optional=True, strides="head?loose"),
    Operand("B_norm", "n", optional=True, field="row_norm", note="None: B is normed already"),
    Operand("C_norm", "n", optional=True, field="row_norm", note="of B_norm's type"),
    Operand("B_bias", "head rank n | head n", optional=True, field="row_bias", strides="head?loose rank?loose"),
    Operand("C_bias", "like B_bias", optional=True, field="row_bias", note="of B_bias's type"),
    Operand("mimo_x", "head rank row | head row", optional=True, field="mimo", strides="head?loose rank?loose"),
    Operand("mimo_z", "like mimo_x", optional=True, field="mimo", there="mimo&z", note="with z, of mimo_x's type"),
    Operand("mimo_o", "like mimo_x", optional=True, field="mimo", there="mimo&!by_rank", note="None: one output for each rank"),
    Operand("norm_weight", "head row", optional=True, strides="head?loose", note="None: no norm of the output"),
    Operand(
        "out", "token rank head row | token head row | token head*row", written=True,
        strides=f"{LEAD} rank?by_rank&loose head?loose row?loose",
        note="None: a new one of x's type",
    ),
    Operand("state_indices", "batch | batch column", Types.INDEX, optional=True, field="index", strides="batch column?accepted"),
    Operand(
        "dst_state_indices", "batch | batch token", Types.INDEX, optional=True, field="index", there="split", strides="batch token?each"
    ),
    Operand("num_accepted_tokens", "batch", Types.INDEX, optional=True, field="accepted", strides="batch"),
    Operand("rand_seed", "slot | 1", Types.I64, optional=True, there="philox_rounds", strides="slot:64"),
    head="heads", row="headdim", n="d_state", group="groups", angle="angles", column="columns", **{"head*row": "heads * headdim"},
)  # fmt: skip
POOLS = ("state", "k_state", "v_state", "angle_state")

# How a mesh of devices may divide them.


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
