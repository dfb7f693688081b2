"""gdn_layer in plain PyTorch: its three operators' references, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .layer_steps import convolved, normed, slots_of
from .linear_attention import linear_attention


def gdn_layer(
    views: Mapping[str, Tensor],
    form: Any,
    eps: float,
    norm_before_gate: bool,
    activation: str,
    scale: float,
    pad_slot_id: int = -1,
    dtype: torch.dtype = torch.float32,
) -> None:
    """mixed_qkv [batch, channels]; z, out [batch, HV, V]; a, b [batch, HV]; conv_state [slots, channels, len]; conv_weight [channels,
    width]; state [slots, HV, V, K]; A_log, dt_bias [HV]; norm_weight [HV, V], where there is a norm. `form` is linear_attention's.

    Computes in `dtype`, and rounds what passes from one operator to the next as these do.
    """
    slots, (_, HV, V, K) = slots_of(views, pad_slot_id), views["state"].shape
    qkv = convolved(views, "mixed_qkv", slots, dtype)
    keys = (qkv.shape[1] - HV * V) // 2
    q, k, v = qkv.split([keys, keys, HV * V], 1)
    rule = {n: views[n] for n in ("state", "A_log", "dt_bias") if n in views}
    rule |= {
        "q": q.unflatten(1, (-1, K)).unsqueeze(1),
        "k": k.unflatten(1, (-1, K)).unsqueeze(1),
        "v": v.unflatten(1, (HV, V)).unsqueeze(1),
        "g": views["a"].unsqueeze(1),
        "beta": views["b"].unsqueeze(1),
        "out": views["out"].unsqueeze(1),
    }
    linear_attention(rule | {"state_indices": slots}, form, scale=scale, dtype=dtype)
    if "norm_weight" in views:
        normed(views, slots, eps=eps, norm_before_gate=norm_before_gate, activation=activation, dtype=dtype)
