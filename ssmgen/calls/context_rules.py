"""How sequences of all families' functions go on over several ranks, by public function. Imported when the first such call comes."""

from __future__ import annotations

from ..spec.family import parts
from .context import Context

RULES: dict[str, Context] = parts("context")
