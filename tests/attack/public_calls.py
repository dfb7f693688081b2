"""A small legal call of every public function on CPU tensors, for tests that make it illegal."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch
from family_cases import cases
from torch import Tensor

import ssmgen
from ssmgen.calls.api import FUNCTIONS

B, H, P, N, T = 2, 2, 8, 32, 2  # sequences, heads, rows, d_state (or K), tokens
SLOTS = 3
BF16, I32 = torch.bfloat16, torch.int32
BY_NAME: dict[str, Callable[..., Any]] = {f.__name__: f for f in FUNCTIONS}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def mamba(*tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    rows = {"x": randn(B, *tokens, H, P, dtype=dtype), "dt": randn(B, *tokens, H), "A": -torch.ones(H)}
    return rows | {n: randn(B, *tokens, 1, N, dtype=dtype) for n in ("B", "C")}


def linear(**more: Any) -> dict[str, Any]:
    heads = {"q": randn(B, H, N), "k": randn(B, H, N), "v": randn(B, H, P), "out": torch.zeros(B, H, P)}
    return {"state": randn(SLOTS, H, P, N), **heads, "state_indices": torch.tensor([2, 0])} | more


def prompt(**more: Any) -> dict[str, Any]:
    keys = {n: randn(B, 5, H, N) for n in ("q", "k")}
    return keys | {"v": randn(B, 5, H, P), "out": torch.zeros(B, 5, H, P)} | more


def layer(inputs: str, channels: int, **more: Any) -> dict[str, Any]:
    return {
        inputs: randn(B, channels),
        "z": randn(B, H * P),
        "conv_state": randn(SLOTS, channels, 3),
        "arrivals": torch.zeros(SLOTS, 1, dtype=I32),
        "conv_weight": randn(channels, 4),
        "conv_bias": None,
        "dt_bias": None,
        "state_indices": torch.tensor([2, 0], dtype=I32),
        "out": torch.zeros(B, H * P),
    } | more


def history(window: int, *both: int) -> dict[str, Any]:
    return {
        "state": randn(B, H, P, N),
        "old_x": randn(B, window, H, P, dtype=BF16),
        "old_B": randn(B, *both, window, 1, N, dtype=BF16),
        "old_dt": randn(B, *both, H, window),
        "prev_num_accepted_tokens": torch.ones(B, dtype=I32),
    }


def _all() -> dict[str, dict[str, Any]]:
    gate, channel_gate, beta = -torch.rand(B, H), -torch.rand(B, H, N), torch.rand(B, H)
    keys, head = randn(B, H, N), torch.ones(H)
    ring = ssmgen.Ring(randn(SLOTS, T, H, N), randn(SLOTS, T, H, P), randn(SLOTS, T, H), torch.rand(SLOTS, T, H))
    replayed = {"state": randn(SLOTS, H, P, N), "ring": ring, "num_accepted_tokens": torch.tensor([1, 2])}
    x, heads = randn(B, 24), {"A_log": torch.zeros(H), "norm_weight": torch.ones(P), "state": randn(SLOTS, H, P, N)}
    rkv = linear(w=channel_gate)
    rkv["r"] = rkv.pop("q")
    step = history(T, 2) | {"old_dA_cumsum": -torch.rand(B, 2, H, T), "cache_buf_idx": torch.zeros(B, dtype=I32)}
    return {
        "selective_state_update": {"state": randn(SLOTS, H, P, N), **mamba(), "out": torch.zeros(B, H, P)},
        "causal_conv1d": {"x": randn(B, 24, 5), "weight": randn(24, 4), "out": torch.zeros(B, 24, 5)},
        "chunk_scan": {**mamba(5), "out": torch.zeros(B, 5, H, P)},
        "chunk_simple_gla": prompt(g=-torch.rand(B, 5, H)),
        "chunk_lightning_attn": prompt(slope=head),
        "causal_conv1d_update": {"x": x, "conv_state": randn(SLOTS, 24, 3), "weight": randn(24, 4), "out": torch.zeros(B, 24)},
        "combine_splits": {"o": randn(3, B, H, 8), "lse": randn(3, B, H), "out": torch.zeros(B, H, 8)},
        "gated_rms_norm": {"x": randn(B, 32), "gate": randn(B, 32), "weight": torch.ones(32), "out": torch.zeros(B, 32)},
        "gated_layer_norm": {
            "x": randn(B, 32), "gate": randn(B, 32), "weight": torch.ones(32), "bias": torch.zeros(32), "out": torch.zeros(B, 32),
        },
        "rms_norm": {"x": randn(B, 32), "weight": torch.ones(32), "residual": randn(B, 32), "out": torch.zeros(B, 32)},
        "gated_delta_rule": linear(g=gate, beta=beta),
        "kda": linear(g=channel_gate, beta=beta),
        "gdn2": linear(g=channel_gate, b=keys, w=randn(B, H, P)),
        "delta_rule": linear(beta=beta),
        "comba": linear(p=keys, g=gate, beta=beta),
        "rwkv6": rkv | {"u": torch.rand(H, N)},
        "rwkv7": rkv | {"kk": keys, "a": keys.clone()},
        "dplr_delta_rule": linear(a=keys, b=keys.clone()),
        "gla": linear(gk=channel_gate),
        "simple_gla": linear(g=gate),
        "lightning_attn": linear(slope=head),
        "gated_delta_rule_commit": replayed,
        "kda_commit": replayed | {"state": randn(SLOTS, H, P, N), "ring": ring._replace(g=-torch.rand(SLOTS, T, H, N))},
        "replay_selective_state_update": {**step, **mamba(T, dtype=BF16), "out": torch.zeros(B, T, H, P)},
        "checkpoint_selective_state_update": {
            **history(8), "ring_start": torch.zeros(B, dtype=I32), **mamba(T, dtype=BF16), "out": torch.zeros(B, T, H, P),
        },
        "materialize_selective_state": {**step, "out": torch.zeros(B, H, P, N)},
        "mamba2_layer": layer(
            "xBC", H * P + 2 * N, dt=randn(B, H), A=-head, state=randn(SLOTS, H, P, N, dtype=BF16), norm_weight=torch.ones(H * P),
        ),
        "gdn_layer": layer("mixed_qkv", H * P + 2 * N, a=randn(B, H), b=randn(B, H), **heads),
        "kda_layer": layer("mixed_qkv", H * P + 2 * N, g=randn(B, H * N), beta=randn(B, H), **heads),
    } | {name: call() for name, call in cases("CALLS").items()}  # fmt: skip


def call_of(name: str) -> dict[str, Any]:
    """Keyword arguments of a call, of new tensors, always the same."""
    torch.manual_seed(0)
    return _all()[name]


def tensors_of(call: dict[str, Any]) -> dict[str, Tensor]:
    flat = {n: t for n, t in call.items() if isinstance(t, Tensor)}
    return flat | {f"{n}.{i}": t for n, v in call.items() if isinstance(v, tuple) for i, t in enumerate(v) if isinstance(t, Tensor)}


def bits_of(call: dict[str, Any]) -> dict[str, bytes]:
    return {n: t.detach().contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else b"" for n, t in tensors_of(call).items()}


def scalars_of(function: Callable[..., Any]) -> list[str]:
    """The parameters that are not tensors, by their annotations: of all kinds, whatever checks them."""
    parameters = signature(function).parameters.values()
    of_tensors = ("Tensor", "Ring")
    return [p.name for p in parameters if p.kind is Parameter.VAR_KEYWORD or not any(word in str(p.annotation) for word in of_tensors)]
