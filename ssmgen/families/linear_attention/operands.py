"""The tensors of linear attention, by their roles in the recurrence, and which of them each public function takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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


class Function(NamedTuple):
    """What a public function takes, beside the state and `out`.

    required: operands that it cannot do without
    roles: those of its parameters that have another name than their operand
    """

    required: tuple[str, ...]
    roles: Mapping[str, str] = {}
    commit: bool = False  # it replays a ring, and has no q and no output

    @property
    def words(self) -> dict[str, str]:
        """Operand -> parameter, where they have different names."""
        own = {operand: parameter for parameter, operand in self.roles.items()}
        if not self.commit:
            return own | {"ring_gk": "ring.g"} | {f"ring_{name}": f"ring.{name}" for name in ("k", "v", "g", "beta")}
        return {"gk": "ring.g"} | {name: f"ring.{name}" for name in ("k", "v", "g", "beta")}

    @property
    def tensors(self) -> tuple[str, ...]:
        """All that it cannot do without."""
        return ("state", *self.required, "num_accepted_tokens" if self.commit else "out")


FUNCTIONS = {
    "gated_delta_rule": Function((*ALWAYS, "g", "beta")),
    "kda": Function((*ALWAYS, "gk", "beta"), {"g": "gk"}),
    "gdn2": Function((*ALWAYS, "gk", "erase", "w"), {"g": "gk", "b": "erase"}),
    "delta_rule": Function((*ALWAYS, "beta")),
    "comba": Function((*ALWAYS, "g", "beta", "read"), {"p": "read"}),
    "rwkv7": Function((*ALWAYS, "gk", "read", "alpha"), {"r": "q", "w": "gk", "kk": "read", "a": "alpha"}),
    "dplr_delta_rule": Function((*ALWAYS, "read", "write"), {"a": "read", "b": "write"}),
    "gla": Function(ALWAYS),
    "simple_gla": Function(ALWAYS),
    "rwkv6": Function((*ALWAYS, "gk", "bonus"), {"r": "q", "w": "gk", "u": "bonus"}),
    "lightning_attn": Function((*ALWAYS, "g"), {"slope": "g"}),
    "gated_delta_rule_commit": Function(("k", "v", "beta"), commit=True),
    "kda_commit": Function(("k", "v", "gk", "beta"), commit=True),
}
