"""The sharding rules of all families, by public function, for `sharded`. Imported with the first DTensor.

A module, because torch.compile cannot trace `parts`, but runs an import while it traces.
"""

from __future__ import annotations

from ..spec.family import parts
from .sharding import Rule

RULES: dict[str, Rule] = parts("sharding")
