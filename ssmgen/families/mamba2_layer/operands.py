"""The tensors of mamba2_layer. `head` and `row` are heads and headdim, `n` is d_state; an axis head*row has all channels of the output."""

from __future__ import annotations

from ...engine.layers.operands import TOKEN, control, convolution
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
