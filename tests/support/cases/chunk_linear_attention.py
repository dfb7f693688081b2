"""The calls of chunk_linear_attention for the tests that run on every family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

BATCH, TOKENS, HEADS, V, K = 4, 5, 4, 16, 32


def _call(own: Callable[[Callable[..., Tensor]], dict[str, Tensor]], device: str = "cpu") -> dict[str, Any]:
    """Arguments by name of a small call: it starts from separate states and ends in a pool. own: the function's operands besides k and
    v."""

    def rand(*inner: int) -> Tensor:
        return torch.rand(BATCH, TOKENS, HEADS, *inner, device=device)

    states = {name: torch.randn(BATCH, HEADS, V, K, device=device) for name in ("initial_states", "state")}
    tokens = {"k": normalize(rand(K) - 0.5, dim=-1).bfloat16(), "v": rand(V).bfloat16(), "out": rand(V).bfloat16()}
    return tokens | own(rand) | states


def _keys(rand: Callable[..., Tensor], *names: str) -> dict[str, Tensor]:
    return {name: normalize(rand(K) - 0.5, dim=-1).bfloat16() for name in names}


_OWN: dict[str, Callable[[Callable[..., Tensor]], dict[str, Tensor]]] = {
    "chunk_kda": lambda rand: _keys(rand, "q") | {"g": -rand(K), "beta": rand()},
    "chunk_gla": lambda rand: _keys(rand, "q") | {"gk": -rand(K)},
    "chunk_gdn2": lambda rand: _keys(rand, "q") | {"g": -rand(K), "b": rand(K).bfloat16(), "w": rand(V)},
    "chunk_comba": lambda rand: _keys(rand, "q", "p") | {"g": -rand(), "beta": rand()},
    "chunk_rwkv7": lambda rand: _keys(rand, "r", "kk") | {"w": -rand(K), "a": rand(K).bfloat16()},
    "chunk_dplr_delta_rule": lambda rand: _keys(rand, "q", "a", "b") | {"gk": -rand(K)},
}
CALLS = {name: partial(_call, own) for name, own in _OWN.items()}  # of each public function
BENCH = {  # options of a benchmark's `run`: two cases or more
    "chunk_linear_attention": {
        "shapes": ((1, 2, 1, 70),),
        "forms": ("kda", "kda_slow", "gla", "rwkv7"),
        "head_k": 16,
        "head_v": 16,
    }
}
