"""Which tensors each public function of linear attention takes, and what it calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...engine.recurrences.attention.operands import ALWAYS


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
