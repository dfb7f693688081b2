"""The tensors of linear attention, by their roles in the recurrence.

`group` numbers key heads, each of which a group of `head`s shares; `key` and `value` are the channels of a head. Kernels call the axis of
heads `head` and the last one `n`, or `row` where it is of value channels.
"""

from __future__ import annotations

from ....spec.operands import LEAD, Operand, Types, table

# Views have the axes of tokens. Views of a commit have the axes of the ring, after an axis of layers.
_VIEW = "batch token head {0} | layer slot token head {0}"
_STRIDES = "layer:64?layers slot:64?commit batch?batched token?several head"
_KEYS, _CHANNELS, _ROWS = "token group key", "token head key", "token head value"


def _vector(name: str, axes: str, optional: bool = True, there: str = "", note: str = "") -> Operand:
    """An operand with an element per key channel."""
    view, strides = _VIEW.format("n"), f"{_STRIDES} n?loose"
    return Operand(name, axes, optional=optional, there=there, view=view, strides=strides, note=note)


def _rows(name: str, optional: bool = True, note: str = "") -> Operand:
    """An operand with an element per value channel."""
    return Operand(name, _ROWS, optional=optional, view=_VIEW.format("row"), strides=f"{_STRIDES} row", note=note)


def _ring(name: str, axes: str) -> Operand:
    """The ring of an operand."""
    there, view = f"{'stores' if name == 'beta' else 'keeps'}&{name}", "slot token head"
    return Operand(
        f"ring_{name}", axes, optional=True, written=True, field=f"kept_{name}", there=there, view=view, strides="slot:64 token head"
    )  # fmt: skip


OPERANDS = table(
    Operand(
        "state", "slot head value key", Types.STATE, written=True, scales="state_scale", view="slot head | layer slot head",
        strides="layer:64?layers slot:64 head:64?heads_apart",
    ),
    _vector("q", _KEYS, there="!commit"),
    _vector("k", _KEYS, optional=False),
    _rows("v", optional=False),
    Operand(
        "g", "token head | head", optional=True, view="batch token head | layer slot token head", strides=_STRIDES, note="decay per head"
    ),
    _vector("gk", _CHANNELS, note="decay per key channel"),
    _rows("gv", note="decay per value channel"),
    Operand("beta", "token head | token head value", optional=True, view=_VIEW.format("row"), strides=f"{_STRIDES} row?beta_rows"),
    Operand("A_log", "head", optional=True, view="head | layer head", strides="layer:64?layers head"),
    Operand(
        "dt_bias", "head | head key | head*key", optional=True, view="head n | layer head n", strides="layer:64?layers head n?gk&loose"
    ),
    _vector("read", _KEYS, note="the key that is read with, if not k"),
    _vector("erase", _CHANNELS, note="factor of the value that is read"),
    _rows("w", note="factor of the value that is written"),
    _vector("write", _KEYS, note="low rank: the written vector, p times"),
    _vector("alpha", _KEYS, note="low rank: the written vector is -(read * alpha)"),
    _vector("bonus", f"{_CHANNELS} | head key", note="factor of the token's own key; the output is otherwise of the state before"),
    Operand(
        "out", _ROWS, optional=True, written=True, there="!commit", view="batch token head row",
        strides="batch?batched token?several head row",
    ),
    Operand("state_indices", "batch | batch column", Types.INDEX, optional=True, field="index", strides="batch column?picks"),
    Operand(
        "dst_state_indices", "batch | batch token", Types.INDEX, optional=True, field="index", there="split", strides="batch token?each"
    ),
    Operand("num_accepted_tokens", "batch", Types.INDEX, optional=True, field="accepted", strides="batch"),
    Operand("cu_seqlens", "starts", Types.INDEX, optional=True),
    Operand(
        "intermediate_states", "kept token+ head value key", optional=True, written=True, field="state", there="intermediates",
        view="batch token", strides="batch:64 token:64",
    ),
    _ring("k", "slot token+ group key"),
    _ring("v", "slot token+ head value"),
    _ring("g", "slot token+ head"),
    _ring("gk", "slot token+ head key"),
    _ring("beta", "slot token+ head | slot token+ head value"),
    Operand("state_scale", "slot head value", Types.F32, optional=True, written=True, there="scaled", view="slot head row",
            strides="slot:64 head row"),
    Operand("parents", "batch token", Types.INDEX, optional=True, strides="batch token"),
    Operand("intermediate_state_indices", "batch", Types.INDEX, optional=True, field="kept_index", strides="batch"),
    Operand("rand_seed", "slot | 1", Types.I64, optional=True, there="philox_rounds", strides="slot:64"),
    Operand("ring_position", "batch", Types.INDEX, optional=True, field="position", strides="batch"),
    Operand("ring_flush", "batch", Types.INDEX, optional=True, field="flush", strides="batch"),
    head="heads", group="key heads", key="K", value="V", kept="batch", column="columns", starts="batch + 1", **{"head*key": "heads * K"},
)  # fmt: skip
ROLES = OPERANDS.names[1 : OPERANDS.names.index("out")]  # operands of a recurrence, without the state
ALWAYS = ("q", "k", "v")
WEIGHTS = tuple([name for name in ROLES if OPERANDS[name].forms[0][0] != LEAD])
# Operands that may come without the axes of a token, the same for every one.
SHARED = {name: forms[-1] for name in ROLES if (forms := OPERANDS[name].forms)[0][0] == LEAD != forms[-1][0]}


def _first(axes: str) -> tuple[str, ...]:
    return tuple([name for name in ROLES if OPERANDS[name].forms[0] == tuple(axes.split())])


# Operands with an element per key channel, of one of k's heads or of v's; and per value channel.
OF_KEY_HEADS, OF_HEADS, ROW_SCALARS = _first(_KEYS), _first(_CHANNELS), _first(_ROWS)
KEY_VECTORS = OF_KEY_HEADS + OF_HEADS
RING = ("k", "v", "g", "beta")  # fields of the functions' ring argument; g holds gk if the call has gk
RINGED = ("k", "v", "g", "gk", "beta")
RINGS = tuple([f"ring_{name}" for name in RINGED])
