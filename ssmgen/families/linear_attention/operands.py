"""The tensors that each public function of linear attention takes, and their parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...engine.recurrences.attention.operands import ALWAYS, OPERANDS

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
