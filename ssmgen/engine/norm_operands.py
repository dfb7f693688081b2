"""The operand table of the norms."""

from __future__ import annotations

from ..spec.operands import Operand, table

_STRIDES = "row group?grouped"
OPERANDS = table(
    Operand("x", "rows group size | rows group*size", view="row group size", strides=_STRIDES, note="the last axis is contiguous"),
    Operand("residual", "like x", optional=True, note="added to x"),
    Operand("gate", "like x", optional=True),
    Operand("weight", "size | group*size | group size", view="group size", optional=True, strides="group?grouped", note="None: 1"),
    Operand("bias", "like weight", optional=True, note="None: 0"),
    Operand("out", "like x", written=True, may_be=("x", "gate", "residual"), note="None: a new one of x's type"),
    Operand("residual_out", "like x", optional=True, written=True, may_be=("residual", "x"), field="sum", note="receives residual + x"),
    rows="*rows",
    group="groups",
    **{"group*size": "groups * size"},
)
SHARED = ("weight", "bias")  # all rows use the same
