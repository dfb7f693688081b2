"""Models of gated delta rules and their relatives: their shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ....select.models import Model
from .problem import Gate


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionModel(Model):
    """A model with the state [heads, dim_v, dim_k] and keys of `key_heads` heads."""

    key_heads: int
    dim_k: int
    dim_v: int
    gate: Gate = Gate.SOFTPLUS
    allow_neg_eigval: bool = False  # beta is twice a sigmoid

    @staticmethod
    def read(row: dict[str, Any]) -> dict[str, Any]:
        return Model.read(row) | ({"gate": Gate(row["gate"])} if "gate" in row else {})

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.dim_v, self.dim_k, self.key_heads

    def divided(self, tp: int) -> AttentionModel:
        heads, key_heads = self._share(self.nheads, "heads", tp), self._share(self.key_heads, "key heads", tp)
        return replace(self, nheads=heads, key_heads=key_heads)
