"""The rules of all families for `sharded`, by public function, as their records name them. Imported when the first DTensor comes."""

from __future__ import annotations

from ..spec.family import parts
from .sharding import Rule

RULES: dict[str, Rule] = parts("sharding")
