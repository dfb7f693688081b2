"""The tensors of Mamba's state update. `head` and `row` are heads and headdim, `n` is d_state; without heads (Mamba-1) rows are `dim`."""

from __future__ import annotations

from ....spec.operands import Operand, Types, table

LEAD = "batch?!ragged token?several"  # strides of an operand of tokens
_ROWS = f"{LEAD} head row"
OPERANDS = table(
    Operand("state", "slot head row n | slot dim n", Types.STATE, written=True, scales="state_scale", strides="slot:64"),
    Operand("x", "token head row | token dim", strides=_ROWS),
    Operand("dt", "token head row | token head | token dim", strides=f"{LEAD} head row?!tied"),
    Operand("A", "head row n | head | dim n", strides="head row?!tied n?!tied&loose", note="negative"),
    Operand("B", "token group n | batch n", strides=f"{LEAD} group n?loose"),
    Operand("C", "like B"),
    Operand("D", "head row | head | dim", optional=True, strides="head row"),
    Operand("z", "like x", optional=True, note="None: no gate"),
    Operand("dt_bias", "head row | head | dim", optional=True, strides="head row?!tied"),
    Operand("out", "like x", written=True, note="None: a new one of x's type"),
    Operand("state_indices", "batch | batch column", Types.INDEX, optional=True, field="index", strides="batch column?accepted"),
    Operand(
        "dst_state_indices", "batch | batch token", Types.INDEX, optional=True, field="index", there="split", strides="batch token?each"
    ),
    Operand("num_accepted_tokens", "batch", Types.INDEX, optional=True, field="accepted", strides="batch"),
    Operand("cu_seqlens", "starts", Types.INDEX, optional=True),
    Operand("parents", "batch token", Types.INDEX, optional=True, strides="batch token"),
    Operand(
        "intermediate_states", "kept token+ head row n", Types.STATE, optional=True, written=True, scales="intermediate_state_scales",
        view="row token", strides="row:64 token:64",
    ),
    Operand("intermediate_state_indices", "batch", Types.INDEX, optional=True, field="intermediate_indices", strides="batch"),
    Operand("rand_seed", "slot | 1", Types.I64, optional=True, there="philox_rounds", strides="slot:64?!several slot?several"),
    Operand("state_scale", "slot head row | slot dim", Types.F32, optional=True, written=True, there="scaled", strides="slot:64 head row"),
    Operand(
        "intermediate_state_scales", "kept token+ head row", Types.F32, optional=True, written=True, there="kept_scaled",
        strides="kept:64 token:64 head row",
    ),
    head="heads", row="headdim", n="d_state", group="groups", kept="rows", column="columns", starts="batch + 1",
)  # fmt: skip
# Operands that only calls of several tokens have.
OF_SEVERAL = (
    "num_accepted_tokens", "cu_seqlens", "parents", "intermediate_states", "intermediate_state_indices", "intermediate_state_scales",
)  # fmt: skip
