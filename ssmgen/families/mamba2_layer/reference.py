"""mamba2_layer in plain PyTorch: its three operators' references, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...engine.layers.reference import convolved, located, normed, slots_of
from ...engine.recurrences.mamba.reference import reference as recurrence


def mamba2_layer(
    views: Mapping[str, Tensor],
    eps: float,
    norm_before_gate: bool,
    dt_softplus: bool,
    dt_limit: tuple[float, float] | None,
    A_is_log: bool = False,
    pad_slot_id: int = -1,
    philox_rounds: int = 0,
    update_state: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    """xBC [batch, channels]; z, out [batch, H, P]; dt [batch, H]; conv_state [slots, channels, len]; conv_weight [channels, width];
    state [slots, H, P, N]; A, D, dt_bias [H, P]; norm_weight [groups, size], if there is a norm; otherwise z gates alone. Several
    tokens: xBC, z, out and dt have a tokens axis after the batch axis.

    Computes in `dtype`, and rounds the values between operators as the operators do.
    """
    state, out = views["state"], views["out"]
    slots, (_, H, P, N) = slots_of(views, pad_slot_id), state.shape
    xBC = convolved(views, "xBC", slots, dtype, update_state)
    x, B, C = xBC.split([H * P, *[(xBC.shape[-1] - H * P) // 2] * 2], -1)
    gated = "norm_weight" in views
    update: dict[str, Any] = {n: views[n] for n in ("state", "A", "D", "dt_bias") if n in views} | located(views, slots, pad_slot_id)
    update |= {
        "x": x.unflatten(-1, (H, P)),
        "dt": views["dt"].unsqueeze(-1).expand(*views["dt"].shape, P),
        "B": B.unflatten(-1, (-1, N)),
        "C": C.unflatten(-1, (-1, N)),
    }
    update |= {"z": views["z"]} if "z" in views and not gated else {}
    rate = -torch.exp(views["A"].to(dtype)).clamp(max=3e38) if A_is_log else views["A"]  # finite, so that rate * 0 is 0
    update["A"] = rate[:, :, None].expand(H, P, N)
    how: dict[str, Any] = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "philox_rounds": philox_rounds, "dtype": dtype}
    recurrence(out=out, update_state=update_state, **update, **how)
    if gated:
        normed(views, slots, eps=eps, norm_before_gate=norm_before_gate, dtype=dtype)
