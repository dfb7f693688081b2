"""The calls of selective_scan for the tests that run on every family."""

from __future__ import annotations

from typing import Any

import torch

BATCH, TOKENS, DIM, N = 4, 5, 32, 16


def call(device: str = "cpu") -> dict[str, Any]:
    """Arguments by name of a small call: it starts from separate states and ends in a pool."""

    def rand(*inner: int) -> torch.Tensor:
        return torch.randn(BATCH, TOKENS, *inner, device=device).bfloat16()

    states = {name: torch.randn(BATCH, DIM, N, device=device) for name in ("initial_states", "state")}
    keys = {name: rand(2, N) for name in ("B", "C")}
    rows = {name: rand(DIM) for name in ("u", "delta", "z", "out")}
    return rows | keys | states | {"A": -torch.rand(DIM, N, device=device), "delta_softplus": True}


CALLS = {"selective_scan": call}  # of each public function
BENCH = {"selective_scan": {"shapes": ((16, 1, 40),)}}  # options of a benchmark's `run`: two cases or more
