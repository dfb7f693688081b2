"""What the axes of selective_scan's tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule

# Of channels_first tensors too: a name for each axis by its place would need the option.
RULES: dict[str, Rule] = {}
