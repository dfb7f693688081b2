"""The tensors that each public function of linear attention takes, and their parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...calls.sharding import Rule
from ...engine.recurrences.attention.operands import ALWAYS, OPERANDS, RING

__all__ = ["FUNCTIONS", "OPERANDS", "Function"]


class Function(NamedTuple):
    """The tensors of a public function, except the state and `out`.

    required: operands that it needs
    roles: parameters whose name differs from their operand's
    """

    required: tuple[str, ...]
    roles: Mapping[str, str] = {}
    commit: bool = False  # it replays a ring; there are neither q nor output

    @property
    def words(self) -> dict[str, str]:
        """Operand -> parameter, if their names differ."""
        own = {operand: parameter for parameter, operand in self.roles.items()}
        if not self.commit:
            return own | {"ring_gk": "ring.g"} | {f"ring_{name}": f"ring.{name}" for name in ("k", "v", "g", "beta")}
        return {"gk": "ring.g"} | {name: f"ring.{name}" for name in ("k", "v", "g", "beta")}

    @property
    def tensors(self) -> tuple[str, ...]:
        """All tensors that it needs."""
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

# How a mesh of devices may divide them.
_AXES = OPERANDS.axes()
_AXES |= {f"ring.{name}": _AXES.pop(f"ring_{name}") for name in RING}
_AXES["ring.g"] += f"|{_AXES.pop('ring_gk')}"
_WRITTEN = tuple([name.replace("ring_", "ring.") for name in OPERANDS.written if name != "ring_gk"])
_commit = Rule(_AXES, ("state",), returns=("state",), by_sequence=False, layers=True, tuples={"ring": RING})

RULES = {
    name: _commit
    if function.commit
    else Rule(_AXES | {n: _AXES[role] for n, role in function.roles.items()}, _WRITTEN, "v", tuples={"ring": RING})
    for name, function in FUNCTIONS.items()
}
