"""The tensors of the replay functions: a pool, the history of each slot, and the new tokens.

`entry` numbers the entries of a history of one step, which has two buffers; `ringed` numbers the entries of a ring. Views of the history
have an axis of buffers in calls of the first kind only.
"""

from __future__ import annotations

from ...calls.sharding import Rule
from ...spec.operands import Operand, Types, table

_OF_STATES, _OF_HISTORY, _OF_SLOTS = "applies&!materialize", "makes&!materialize", "applies&advance"  # which kernels write these
_LEAD = "batch?!ragged token"
_ROWS = f"{_LEAD} head row?loose"
_HISTORY = "slot:64 buffer?steps head token"
_SIZES, _SIZES_SEEN = "slot buffer head entry | slot head ringed", "slot buffer head token | slot head token"
OPERANDS = table(
    Operand(
        "state", "slot head row n", Types.STATE, written=True, writes=_OF_STATES, scales="state_scale", there="applies", strides="slot:64"
    ),
    Operand(
        "old_x",
        "slot entry head row | slot ringed head row",
        written=True,
        writes=_OF_STATES,
        field="x",
        there="applies",
        view="slot token head row",
        strides="slot:64 token head row?loose",
    ),
    Operand(
        "old_B",
        "slot buffer entry group n | slot ringed group n",
        written=True,
        writes=_OF_HISTORY,
        field="x",
        view="slot buffer token group n | slot token group n",
        strides="slot:64 buffer?steps token group n?loose",
    ),
    Operand("old_dt", _SIZES, Types.F32, written=True, writes=_OF_HISTORY, view=_SIZES_SEEN, strides=_HISTORY),
    Operand(
        "old_dA_cumsum",
        _SIZES,
        Types.F32,
        optional=True,
        written=True,
        writes=_OF_HISTORY,
        there="steps",
        view=_SIZES_SEEN,
        strides=_HISTORY,
    ),
    Operand("cache_buf_idx", "slot", Types.I32, optional=True, written=True, writes=_OF_SLOTS, there="steps"),
    Operand("ring_start", "slot", Types.I32, optional=True, written=True, writes=_OF_SLOTS, there="rings"),
    Operand("prev_num_accepted_tokens", "slot | batch", Types.I32, written=True, writes=_OF_SLOTS),
    Operand("x", "token head row", optional=True, there="applies&!materialize", strides=_ROWS),
    Operand("dt", "token head | token head row", optional=True, there="makes&!materialize", strides=f"{_LEAD} head"),
    Operand("A", "head | head row | head row n", optional=True, there="takes_rate", strides="head"),
    Operand("B", "token group n", optional=True, field="x", there="makes&!materialize", strides=f"{_LEAD} group n?loose"),
    Operand("C", "like B", optional=True, field="x", there="!materialize"),
    Operand("D", "head row | head", optional=True, there="applies&D&!materialize", strides="head row"),
    Operand("z", "like x", optional=True, there="applies&z&!materialize"),
    Operand("dt_bias", "head | head row", optional=True, there="makes&dt_bias&!materialize", strides="head"),
    Operand(
        "out",
        "token head row",
        written=True,
        field="out_type",
        there="applies",
        strides="slot:64?materialize batch?!ragged&!materialize token?!materialize head?!materialize row?loose&!materialize",
    ),
    Operand("state_indices", "batch", Types.INDEX, optional=True, field="index"),
    Operand("cu_seqlens", "starts", Types.INDEX, optional=True),
    Operand(
        "rand_seed", "slot | 1", Types.I64, optional=True, written=True, writes=_OF_SLOTS, there="applies&philox_rounds", strides="slot:64"
    ),
    Operand("arrivals", "slot", Types.I32, optional=True, written=True, there="applies&advance"),
    Operand(
        "state_scale",
        "slot head row",
        Types.F32,
        optional=True,
        written=True,
        writes=_OF_STATES,
        there="applies&scaled",
        strides="slot:64 head row",
    ),
    Operand("flush", "batch", Types.BOOL, optional=True, there="caches"),
    # The first of two kernels writes these, and the second one reads them.
    Operand("mix", "batch head made entries", Types.F32, optional=True, written=True, writes="makes", there="!fused"),
    Operand("sums", "batch head made", Types.F32, optional=True, written=True, writes="makes", there="!fused"),
    head="heads",
    row="headdim",
    n="d_state",
    group="groups",
    entry="W",
    ringed="R",
    buffer="2",
    starts="batch + 1",
    made="T",
    entries="W + T",
)
BETWEEN = ("mix", "sums")
LATE = ("B", "C", "x", "out", *BETWEEN)  # written, or still read, by the previous kernel, if that is the convolution or the first of two

# How a mesh of devices may divide them.
_AXES = OPERANDS.axes()
# Noise depends on an element's place in the pool, so a call with seeds is not divided.
_step = Rule(_AXES, tuple([name for name in OPERANDS.written if name not in ("rand_seed", *BETWEEN)]), "x")

RULES = {
    "replay_selective_state_update": _step,
    "checkpoint_selective_state_update": _step,
    "materialize_selective_state": Rule(_AXES | {"out": "batch head row n"}, ("out",)),
}
