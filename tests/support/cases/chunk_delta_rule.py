"""The calls of chunk_delta_rule for the tests that run on every family."""

from __future__ import annotations

from typing import Any

import torch

BATCH, TOKENS, HEADS, V, K = 4, 5, 4, 16, 32


def plain(device: str = "cpu") -> dict[str, Any]:
    """Arguments by name of a small call of chunk_delta_rule: it starts from separate states and ends in a pool."""

    def rand(*inner: int) -> torch.Tensor:
        return torch.randn(BATCH, TOKENS, HEADS, *inner, device=device).bfloat16()

    states = {name: torch.randn(BATCH, HEADS, V, K, device=device) for name in ("initial_states", "state")}
    q, k, v, out = rand(K), rand(K) / K**0.5, rand(V), rand(V)
    return {"q": q, "k": k, "v": v, "beta": torch.rand(BATCH, TOKENS, HEADS, device=device), "out": out} | states


def gated(device: str = "cpu") -> dict[str, Any]:
    """The same of chunk_gated_delta_rule."""
    return plain(device) | {"g": -torch.rand(BATCH, TOKENS, HEADS, device=device)}


CALLS = {"chunk_delta_rule": plain, "chunk_gated_delta_rule": gated}  # of each public function
BENCH = {  # options of a benchmark's `run`: two cases or more
    "chunk_delta_rule": {
        "shapes": ((1, 2, 1, 70),),
        "forms": ("batch", "pool", "delta_rule"),
        "head_k": 16,
        "head_v": 16,
    }
}
