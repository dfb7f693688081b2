"""The tensors of combine_splits. Rows have any axes; kernels see the axes that cannot be merged: outer, middle and inner."""

from __future__ import annotations

from ...spec.operands import Operand, Types, table

_ROWS = "outer middle?three inner?apart"
_SPLITS = "split?!pair outer?!indexed middle?three inner?apart"
OPERANDS = table(
    Operand("o", "split rows d_v | rows d_v", strides=_SPLITS, note="splits; or a pair of tensors, one for each"),
    Operand("lse", "split rows | rows", Types.F32, strides=_SPLITS),
    Operand("o_other", "rows d_v", optional=True, field="o", there="pair", strides=_SPLITS),
    Operand("lse_other", "rows", Types.F32, optional=True, there="pair", strides=_SPLITS),
    Operand("num_splits", "starts", Types.INDEX, optional=True, strides="outer"),
    Operand("attn_sink", "rows", optional=True, field="sink", strides=_ROWS, note="expandable to the rows"),
    Operand("mask", "rows", Types.BOOL, optional=True, strides=_ROWS, note="expandable to the rows"),
    Operand("out", "rows d_v", written=True, may_be=("o", "o_other"), strides=_ROWS),
    Operand("lse_out", "rows", Types.F32, optional=True, written=True, may_be=("lse", "lse_other"), there="lse_out", strides=_ROWS),
    rows="*rows", split="splits", starts="batch + 1",
)  # fmt: skip
