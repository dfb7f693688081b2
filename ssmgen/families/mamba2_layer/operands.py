"""The tensors of mamba2_layer. `head` and `row` are heads and headdim, `n` is d_state; an axis head*row has all channels of the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.layers.operands import TOKEN, control, convolution, rule_of, sizes
from ...spec.operands import Operand, Types, table

OPERANDS = table(
    Operand("state", "slot head row n", written=True, strides="slot:64"),
    *convolution("xBC"),
    Operand("dt", "token head", strides=f"{TOKEN} head"),
    Operand("A", "head", view="head row", strides="head"),
    Operand("D", "head | head row", optional=True, view="head row", strides="head row"),
    Operand("z", "token head*row", optional=True, view="token head row", strides=f"{TOKEN} head row"),
    Operand("dt_bias", "head", optional=True, view="head row", strides="head"),
    Operand("norm_weight", "head*row | size", optional=True, field="norm.weight", there="norm_inside"),
    Operand("out", "like z", written=True),
    *control(
        "intermediate_states", "head row n",
        Operand("rand_seed", "slot | 1", Types.I64, optional=True, there="philox_rounds", strides="slot:64"),
    ),
    head="heads", row="headdim", n="d_state", group="groups", tap="width - 1", kept="rows", column="columns", size="norm_group_size",
    **{"head*row": "heads * headdim"},
)  # fmt: skip

# How a mesh of devices may divide them.


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
