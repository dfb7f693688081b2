"""The tensors of linear attention, by their roles in the recurrence."""

from __future__ import annotations

_KEYS, _CHANNELS, _ROWS = "* group key", "* head key", "* head value"
# Axes of what a token has, in the words of calls/sharding.py: a group of heads shares a key head; `|` separates the forms that are taken.
# In the order of the kernels' arguments, after the state.
OPERANDS = {
    "q": _KEYS,
    "k": _KEYS,
    "v": _ROWS,
    "g": "* head|head",  # decay per head
    "gk": _CHANNELS,  # decay per key channel
    "gv": _ROWS,  # decay per value channel
    "beta": "* head|* head value",
    "A_log": "head",
    "dt_bias": "head|head key",
    "read": _KEYS,  # what is read with, if not k
    "erase": _CHANNELS,  # factor of what is read
    "w": _ROWS,  # factor of what is written
    "write": _KEYS,  # low rank: what is written, p times
    "alpha": _KEYS,  # low rank: what is written is -(read∘alpha)
    "bonus": f"{_CHANNELS}|head key",  # factor of the token's own key in its output, which otherwise is of the state before it
}
ALWAYS = ("q", "k", "v")
OPTIONAL = tuple(name for name in OPERANDS if name not in ALWAYS)
WEIGHTS = tuple(name for name, axes in OPERANDS.items() if not axes.startswith("*"))

# Operands that may come without the axes of a token, the same for every one.
SHARED = {name: forms[-1].split() for name, axes in OPERANDS.items() if (forms := axes.split("|"))[0][0] == "*" != forms[-1][0]}


def _first(form: str) -> tuple[str, ...]:
    return tuple(name for name, axes in OPERANDS.items() if axes.split("|")[0] == form)


# Operands with an element per key channel, of one of k's heads or of v's; and per value channel.
OF_KEY_HEADS, OF_HEADS, ROW_SCALARS = _first(_KEYS), _first(_CHANNELS), _first(_ROWS)
KEY_VECTORS = OF_KEY_HEADS + OF_HEADS

# A call's tensors, in the order of the kernels' arguments.
CONTROL = ("state_indices", "dst_state_indices", "num_accepted_tokens", "cu_seqlens")
RINGED = ("k", "v", "g", "gk", "beta")
RINGS = tuple(f"ring_{name}" for name in RINGED)
KEPT = ("parents", "intermediate_state_indices")  # of intermediate states
NAMES = ("state", *OPERANDS, "out", *CONTROL, "intermediate_states", *RINGS, "state_scale", *KEPT)
