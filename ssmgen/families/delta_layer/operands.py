"""The tensors of gdn_layer, which has a decay per head, and of kda_layer, which has one per key channel.

`key` and `value` are the channels of a head. Kernels name the gates by their roles in the recurrence: g, gk and beta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.layers.operands import TOKEN, control, convolution, rule_of, sizes
from ...spec.operands import Operand, Table, Types, table

_HEADS = f"{TOKEN} head"


def _table(*gates: Operand, bias: Operand, A_log: Operand) -> Table:
    return table(
        Operand("state", "slot head value key", written=True, view="slot", strides="slot:64"),
        *convolution("mixed_qkv"),
        *gates,
        A_log,
        bias,
        Operand(
            "z", "token head*value | token head value", optional=True, field="norm.gate", there="norm_inside", view="token head row",
            strides=_HEADS,
        ),
        Operand("norm_weight", "value", optional=True, field="norm.weight", there="norm_inside"),
        Operand("out", "like z", written=True, view="token head row", strides=f"{TOKEN} head row"),
        *control(
            "state", "head value key",
            Operand("rand_seed", "slot | 1", Types.I64, optional=True, there="philox_rounds", strides="slot:64"),
        ),
        head="heads", value="V", key="K", group="key heads", tap="width - 1", kept="rows", column="columns",
        **{"head*value": "heads * V", "head*key": "heads * K"},
    )  # fmt: skip


def _rate(optional: bool) -> Operand:
    return Operand("A_log", "head", optional=optional, there="A_log", strides="head")


FUNCTIONS = {
    "gdn_layer": _table(
        Operand("a", "token head", role="g", field="g", strides=_HEADS),
        Operand("b", "token head", role="beta", field="beta", strides=_HEADS),
        A_log=_rate(optional=False),
        bias=Operand("dt_bias", "head", optional=True, strides="head"),
    ),
    "kda_layer": _table(
        Operand("g", "token head*key | token head key", role="gk", field="gk", view="token head n", strides=f"{_HEADS} n?loose"),
        Operand("beta", "token head", strides=_HEADS),
        A_log=_rate(optional=True),
        bias=Operand("dt_bias", "head*key | head key", optional=True, view="head n", strides="head n?loose"),
    ),
}

# How a mesh of devices may divide them.


def _kinds(given: Mapping[str, Any]) -> dict[str, str]:
    if (found := sizes(given)) is None:
        return {}
    heads, *inner, groups = found
    keys, values = inner if given.get("state_layout") == "kv" else inner[::-1]
    return {"channels": f"group:{groups}x{keys}+group:{groups}x{keys}+head:{heads}x{values}"}


RULES = {name: rule_of(operands, "mixed_qkv", _kinds) for name, operands in FUNCTIONS.items()}
