"""Calls of the operators that several ranks share: operands on one device, the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from family_cases import cases

from ssmgen.spec.family import parts

BATCH, H, P, N, STEPS = 4, 4, 16, 32, 3
BF16, F32 = torch.bfloat16, torch.float32
Tensors = dict[str, Any]


def normal(device: str, *shape: int, dtype: torch.dtype = F32, positive: bool = False) -> torch.Tensor:
    t = torch.randn(shape)  # on the CPU, so that all ranks draw the same
    return (t.abs() if positive else t).to(device, dtype)


def mamba(device: str, groups: int, tokens: tuple[int, ...] = ()) -> Tensors:
    lead = (BATCH, *tokens)
    return {
        "state": normal(device, BATCH, H, P, N, dtype=BF16),
        "x": normal(device, *lead, H, P, dtype=BF16),
        "dt": normal(device, *lead, H, dtype=BF16),
        "A": -normal(device, H, positive=True),
        "B": normal(device, *lead, groups, N, dtype=BF16),
        "C": normal(device, *lead, groups, N, dtype=BF16),
        "D": normal(device, H),
        "z": normal(device, *lead, H, P, dtype=BF16),
        "dt_bias": normal(device, H),
        "dt_softplus": True,
    }


def mamba1(device: str) -> Tensors:
    return {
        "state": normal(device, BATCH, H * P, N),
        "x": normal(device, BATCH, H * P, dtype=BF16),
        "dt": normal(device, BATCH, H * P, dtype=BF16),
        "A": -normal(device, H * P, N, positive=True),
        "B": normal(device, BATCH, N, dtype=BF16),
        "C": normal(device, BATCH, N, dtype=BF16),
        "D": normal(device, H * P),
        "dt_bias": normal(device, H * P),
        "dt_limit": (0.0, 8.0),
    }


def linear(device: str, name: str, key_heads: int = H, tokens: tuple[int, ...] = ()) -> Tensors:
    lead = (BATCH, *tokens)

    def heads(*last: int, positive: bool = False) -> torch.Tensor:
        return normal(device, *lead, H, *last, dtype=BF16, positive=positive)

    def keys() -> torch.Tensor:
        return normal(device, *lead, key_heads, N, dtype=BF16) / 4

    call: Tensors = {"state": normal(device, BATCH, H, P, N), "k": keys(), "v": heads(P)}
    call |= {"r": keys(), "w": -heads(N, positive=True)} if name.startswith("rwkv") else {"q": keys()}
    if name in ("gated_delta_rule", "comba", "simple_gla"):
        call["g"] = -heads(positive=True)
    if name in ("kda", "gdn2"):
        call["g"] = -heads(N, positive=True)
    if name in ("gated_delta_rule", "kda", "delta_rule", "comba"):
        call |= {"beta": heads(positive=True), "use_qk_l2norm": True}
    if name == "gated_delta_rule":
        call |= {"A_log": normal(device, H), "dt_bias": normal(device, H)}
    if name == "kda":
        call |= {"A_log": normal(device, H), "dt_bias": normal(device, H * N)}
    more = {
        "rwkv6": lambda: {"u": normal(device, H, N)},
        "rwkv7": lambda: {"kk": keys(), "a": keys()},
        "comba": lambda: {"p": keys()},
        "gdn2": lambda: {"b": heads(N), "w": heads(P)},
        "dplr_delta_rule": lambda: {"a": keys(), "b": keys(), "gk": -heads(N, positive=True)},
        "gla": lambda: {"gk": -heads(N, positive=True), "gv": -heads(P, positive=True)},
        "lightning_attn": lambda: {"slope": normal(device, H, positive=True)},
    }
    return call | more.get(name, dict)()


def convolution(device: str, tokens: tuple[int, ...] = ()) -> Tensors:
    return {
        "x": normal(device, BATCH, H * P, *tokens, dtype=BF16),
        "weight": normal(device, H * P, 4, dtype=BF16),
        "bias": normal(device, H * P),
        "activation": "silu",
    }


def pool(device: str, call: Tensors, state: str, indices: str) -> Tensors:
    """The call on slots of a larger pool."""
    t = call[state]
    return call | {state: normal(device, BATCH + 2, *t.shape[1:], dtype=t.dtype), indices: torch.tensor([3, 0, 5, -1], device=device).int()}


def replay(device: str) -> Tensors:
    T, W = 2, 3
    call = mamba(device, 2, (T,))
    return call | {
        "old_x": normal(device, BATCH, W, H, P, dtype=BF16),
        "old_B": normal(device, BATCH, 2, W, 2, N, dtype=BF16),
        "old_dt": normal(device, BATCH, 2, H, W, positive=True),
        "old_dA_cumsum": -normal(device, BATCH, 2, H, W, positive=True),
        "cache_buf_idx": torch.tensor([0, 1, 0, 1], device=device).int(),
        "prev_num_accepted_tokens": torch.tensor([1, 0, 2, 3], device=device).int(),
    }


def scan_checkpoints(device: str) -> Tensors:
    call = mamba(device, 2, (5,)) | {"checkpoint_positions": torch.tensor([1, 5, 12], device=device), "return_checkpoints": True}
    return call | {"seq_idx": torch.tensor([[0, 0, 1, 1, 0]] * BATCH, device=device).int()}


def channels_first(device: str) -> Tensors:
    """A call of Mamba-1 over prompts, with one group of channels and the token axis last."""
    rows = {name: normal(device, BATCH, H * P, 9, dtype=BF16) for name in ("u", "delta", "z")}
    keys = {name: normal(device, BATCH, N, 9, dtype=BF16) for name in ("B", "C")}
    states = {"A": -normal(device, H * P, N, positive=True), "state": normal(device, BATCH, H * P, N)}
    return rows | keys | states | {"channels_first": True, "delta_softplus": True}


def checkpointed(device: str) -> Tensors:
    """A step whose history is a ring, of which some entries count."""
    ring = 8
    return mamba(device, 2, (2,)) | {
        "old_x": normal(device, BATCH, ring, H, P, dtype=BF16),
        "old_B": normal(device, BATCH, ring, 2, N, dtype=BF16),
        "old_dt": normal(device, BATCH, H, ring, positive=True),
        "ring_start": torch.tensor([0, 3, 7, 5], device=device).int(),
        "prev_num_accepted_tokens": torch.tensor([0, 2, 6, 4], device=device).int(),
    }


def materialized(device: str) -> Tensors:
    """The states that such histories stand for."""
    call = checkpointed(device)
    kept = ("state", "old_x", "old_B", "old_dt", "ring_start", "prev_num_accepted_tokens", "A")
    return {name: call[name] for name in kept} | {"max_tokens": 2}


def splits(device: str) -> Tensors:
    o, lse = normal(device, 3, BATCH, H, P, dtype=BF16), normal(device, 3, BATCH, H)
    return {"o": o, "lse": lse, "attn_sink": normal(device, H), "return_lse": True}


def norm(device: str, *shape: int, **more: Any) -> Tensors:
    return {"x": normal(device, *shape, dtype=BF16), "gate": normal(device, *shape, dtype=BF16)} | more


def norms(device: str) -> dict[str, tuple[str, Tensors]]:
    each, every, rows = normal(device, P), normal(device, H * P), normal(device, BATCH, 2, H, P, dtype=BF16)
    return {
        "norm-heads": ("gated_rms_norm", norm(device, BATCH, 2, H, P, weight=each)),
        "norm-channels": ("gated_rms_norm", norm(device, BATCH, H * P, weight=every, group_size=2 * P)),
        "layer-norm": ("gated_layer_norm", norm(device, BATCH, H, P, weight=every, bias=normal(device, H, P))),
        "plain-norm": ("rms_norm", {"x": rows, "weight": each, "residual": normal(device, BATCH, 2, H, P)}),
    }


def calls(device: str) -> dict[str, tuple[str, Tensors]]:
    """(function, its arguments by name) of each case; a rank's own tensors are drawn the same on all."""
    torch.manual_seed(0)
    window = {"conv_state": normal(device, BATCH, H * P, 3, dtype=BF16)}
    found = {
        "mamba2-groups2": ("selective_state_update", mamba(device, 2)),
        "mamba2-one-group": ("selective_state_update", mamba(device, 1)),
        "mamba2-pool": ("selective_state_update", pool(device, mamba(device, 4), "state", "state_indices")),
        "mamba2-tokens": (
            "selective_state_update",
            mamba(device, 2, (3,)) | {"intermediate_states": torch.zeros(BATCH, 3, H, P, N, device=device, dtype=BF16)},
        ),
        "mamba1": ("selective_state_update", mamba1(device)),
        "conv-update": ("causal_conv1d_update", convolution(device) | window),
        "conv-update-pool": ("causal_conv1d_update", pool(device, convolution(device, (2,)) | window, "conv_state", "conv_state_indices")),
        "conv": ("causal_conv1d", convolution(device, (9,)) | {"return_final_states": True}),
        "conv-states": ("causal_conv1d", convolution(device, (9,)) | {"conv_states": normal(device, BATCH, H * P, 3, dtype=BF16)}),
        "scan": ("chunk_scan", mamba(device, 2, (70,))),
        "simple-gla-scan": ("chunk_simple_gla", linear(device, "simple_gla", 2, (70,))),
        "lightning-scan": ("chunk_lightning_attn", linear(device, "lightning_attn", 2, (70,))),
        "scan-checkpoints": ("chunk_scan", scan_checkpoints(device)),
        "selective-scan-channels-first": ("selective_scan", channels_first(device)),
        "replay": ("replay_selective_state_update", replay(device)),
        "replay-ring": ("checkpoint_selective_state_update", checkpointed(device)),
        "materialize": ("materialize_selective_state", materialized(device)),
        "combine": ("combine_splits", splits(device)),
        "gdn-shared-keys": ("gated_delta_rule", linear(device, "gated_delta_rule", 1)),
        "gdn-tokens": ("gated_delta_rule", linear(device, "gated_delta_rule", 2, (3,))),
        "kda-pool": ("kda", pool(device, linear(device, "kda"), "state", "state_indices")),
    }
    rules = parts("sharding")
    forms = [n for n in rules if "state" in rules[n].axes and "ring.k" in rules[n].axes and not n.endswith("commit")]
    own = {name: (name, call(device)) for name, call in cases("CALLS").items() if name in rules}
    return found | norms(device) | {name: (name, linear(device, name)) for name in forms} | own
