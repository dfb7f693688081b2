"""The cases of token_shift for the tests of all families."""

from __future__ import annotations

from typing import Any

import torch


def call(device: str = "cpu") -> dict[str, Any]:
    """Arguments by name of a small call: the last row is padding."""
    state, x = torch.randn(6, 24, device=device), torch.randn(4, 24, device=device)
    slots = torch.tensor([3, 0, 5, -1], dtype=torch.int32, device=device)
    return {"state": state, "x": x, "mix": torch.rand(24, device=device), "state_indices": slots, "out": torch.zeros(4, 24, device=device)}


CALLS = {"token_shift": call}  # of each public function
BENCH = {"token_shift": {"dims": (64,), "batches": (1, 9)}}  # options of a benchmark's `run`: two cases or more
