"""The axes of chunk_delta_rule's tensors."""

from __future__ import annotations

from ...engine.chunks.sharding import rule_of
from .operands import FUNCTIONS

RULES = {name: rule_of(table, "v") for name, table in FUNCTIONS.items()}
