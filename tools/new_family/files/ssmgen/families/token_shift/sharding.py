"""What the axes of token_shift's tensors are."""

from __future__ import annotations

from ...calls.sharding import Rule

ROW = dict.fromkeys(("state", "x", "out"), "batch head")

RULES = {"token_shift": Rule({**ROW, "mix": "head", "state_indices": "batch"}, written=("state", "out"))}
