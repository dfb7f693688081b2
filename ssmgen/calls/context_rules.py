"""How each public function continues sequences on the next rank, collected from all families. Imported at the first such call, as
`sharding_rules` is.
"""

from __future__ import annotations

from ..spec.family import parts
from .context import Context

RULES: dict[str, Context] = parts("context")
