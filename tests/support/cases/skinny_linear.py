"""The cases of skinny_linear for the tests of all families."""

from __future__ import annotations

from typing import Any

import torch


def call(device: str = "cpu") -> dict[str, Any]:
    """Arguments by name of a small call."""
    x, weight, bias = torch.randn(4, 24, device=device), torch.randn(16, 24, device=device), torch.randn(16, device=device)
    return {"x": x, "weight": weight, "bias": bias, "out": torch.zeros(4, 16, device=device)}


CALLS = {"skinny_linear": call}  # of each public function
BENCH = {
    "skinny_linear": {"shapes": ((64, 512),), "rows": (1, 9), "weights": ("x", "i8", "e4m3")}
}  # options of a benchmark's `run`: two cases or more
