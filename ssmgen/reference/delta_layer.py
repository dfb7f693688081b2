"""gdn_layer and kda_layer in plain PyTorch: their three operators' references, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .layer_steps import convolved, normed, slots_of
from .linear_attention import linear_attention


def delta_layer(
    views: Mapping[str, Tensor],
    form: Any,
    eps: float,
    norm_before_gate: bool,
    activation: str,
    scale: float,
    lower_bound: float = 0.0,
    pad_slot_id: int = -1,
    dtype: torch.dtype = torch.float32,
) -> None:
    """mixed_qkv [batch, channels]; z, out [batch, HV, V]; conv_state [slots, channels, len]; conv_weight [channels, width]; state [slots,
    HV, V, K]; A_log [HV]; norm_weight [HV, V], where there is a norm. `form` is linear_attention's. gdn_layer: a, b [batch, HV], dt_bias
    [HV]; kda_layer: g [batch, HV, K], beta [batch, HV], dt_bias [HV, K].

    Computes in `dtype`, and rounds what passes from one operator to the next as these do.
    """
    slots, (_, HV, V, K) = slots_of(views, pad_slot_id), views["state"].shape
    qkv = convolved(views, "mixed_qkv", slots, dtype)
    keys = (qkv.shape[1] - HV * V) // 2
    q, k, v = qkv.split([keys, keys, HV * V], 1)
    rule = {n: views[n] for n in ("state", "A_log", "dt_bias") if n in views}
    gates = {"g": "a", "beta": "b"} if "a" in views else {"gk": "g", "beta": "beta"}
    rule |= {role: views[name].unsqueeze(1) for role, name in gates.items()}
    rule |= {
        "q": q.unflatten(1, (-1, K)).unsqueeze(1),
        "k": k.unflatten(1, (-1, K)).unsqueeze(1),
        "v": v.unflatten(1, (HV, V)).unsqueeze(1),
        "out": views["out"].unsqueeze(1),
    }
    linear_attention(rule | {"state_indices": slots}, form, scale=scale, lower_bound=lower_bound, dtype=dtype)
    if "norm_weight" in views:
        normed(views, slots, eps=eps, norm_before_gate=norm_before_gate, activation=activation, dtype=dtype)
