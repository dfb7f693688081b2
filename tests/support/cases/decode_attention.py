"""The cases of decode_attention for the tests of all families."""

from __future__ import annotations

from typing import Any

import torch


def call(device: str = "cpu") -> dict[str, Any]:
    """Arguments by name of a small call: the last sequence is padding."""
    made = {name: torch.randn(3, heads, 16, device=device) for name, heads in (("q", 4), ("k", 2), ("v", 2), ("gate", 4))}
    made |= {name: torch.randn(3, 2, 6, 16, device=device) for name in ("key_cache", "value_cache")}
    made |= {name: torch.randn(3, 8, device=device) for name in ("cos", "sin")}
    made |= {name: torch.randn(16, device=device) for name in ("q_norm", "k_norm")}
    return {**made, "position": torch.tensor([3, 0, -1], device=device), "out": torch.zeros(3, 4, 16, device=device)}


CALLS = {"decode_attention": call}  # of each public function
BENCH = {
    "decode_attention": {"shapes": ((4, 2, 16),), "keys": (5,), "batches": (1, 6)}
}  # options of a benchmark's `run`: two cases or more
