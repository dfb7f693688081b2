"""gdn_layer and kda_layer in plain PyTorch: their three operators' references, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...engine.layers.reference import convolved, located, normed, slots_of
from ...engine.recurrences.attention.reference import reference as recurrence


def delta_layer(
    views: Mapping[str, Tensor],
    form: Any,
    eps: float,
    norm_before_gate: bool,
    activation: str,
    scale: float,
    lower_bound: float = 0.0,
    pad_slot_id: int = -1,
    update_state: bool = True,
    philox_rounds: int = 0,
    keys_first: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """mixed_qkv [batch, channels]; z, out [batch, HV, V]; conv_state [slots, channels, len]; conv_weight [channels, width]; state [slots,
    HV, V, K]; A_log [HV]; norm_weight [HV, V], where there is a norm. `form` is the recurrence's. gdn_layer: a, b [batch, HV], dt_bias
    [HV]; kda_layer: g [batch, HV, K], beta [batch, HV], dt_bias [HV, K]. Several tokens: mixed_qkv, z, out, a, b, g and beta have a tokens
    axis after the batch axis.

    Computes in `dtype`, and rounds the values between operators as the operators do.
    """
    slots, (_, HV, V, K), several = slots_of(views, pad_slot_id), views["state"].shape, views["mixed_qkv"].dim() == 3
    qkv = convolved(views, "mixed_qkv", slots, dtype, update_state)
    keys = (qkv.shape[-1] - HV * V) // 2
    q, k, v = qkv.split([keys, keys, HV * V], -1)
    gates = {"g": "a", "beta": "b"} if "a" in views else {"gk": "g", "beta": "beta"}
    rule = {role: views[name] for role, name in gates.items()} | {"out": views["out"]}
    rule |= {"q": q.unflatten(-1, (-1, K)), "k": k.unflatten(-1, (-1, K)), "v": v.unflatten(-1, (HV, V))}
    if not several:
        rule = {name: t.unsqueeze(1) for name, t in rule.items()}
    rule |= {n: views[n] for n in ("state", "A_log", "dt_bias") if n in views} | located(views, slots, pad_slot_id)
    how: dict[str, Any] = {"scale": scale, "lower_bound": lower_bound, "philox_rounds": philox_rounds, "keys_first": keys_first}
    recurrence(rule, form, **how, update_state=update_state, dtype=dtype)
    if "norm_weight" in views:
        normed(views, slots, eps=eps, norm_before_gate=norm_before_gate, activation=activation, dtype=dtype)
