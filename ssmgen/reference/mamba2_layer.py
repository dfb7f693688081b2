"""mamba2_layer in plain PyTorch: its three operators' references, one after the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .layer_steps import convolved, normed, slots_of
from .selective_state_update import selective_state_update


def mamba2_layer(
    views: Mapping[str, Tensor],
    eps: float,
    norm_before_gate: bool,
    dt_softplus: bool,
    dt_limit: tuple[float, float] | None,
    A_is_log: bool = False,
    pad_slot_id: int = -1,
    philox_rounds: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """xBC [batch, channels]; z, out [batch, H, P]; dt [batch, H]; conv_state [slots, channels, len]; conv_weight [channels, width];
    state [slots, H, P, N]; A, D, dt_bias [H, P]; norm_weight [groups, size], where there is a norm; without, z gates by itself.

    Computes in `dtype`, and rounds what passes from one operator to the next as these do.
    """
    state, out = views["state"], views["out"]
    slots, (_, H, P, N) = slots_of(views, pad_slot_id), state.shape
    xBC = convolved(views, "xBC", slots, dtype)
    x, B, C = xBC.split([H * P, *[(xBC.shape[1] - H * P) // 2] * 2], 1)
    gated = "norm_weight" in views
    update = {n: views[n] for n in ("state", "A", "D", "dt_bias", "rand_seed") if n in views}
    update |= {
        "x": x.unflatten(1, (H, P)),
        "dt": views["dt"].unsqueeze(2).expand(-1, H, P),
        "B": B.unflatten(1, (-1, N)),
        "C": C.unflatten(1, (-1, N)),
    }
    update |= {"z": views["z"]} if "z" in views and not gated else {}
    rate = -torch.exp(views["A"].to(dtype)).clamp(max=3e38) if A_is_log else views["A"]  # finite, so that rate * 0 is 0
    update["A"] = rate[:, :, None].expand(H, P, N)
    how = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "philox_rounds": philox_rounds, "dtype": dtype}
    selective_state_update(**update, out=out, state_indices=slots, **how)
    if gated:
        normed(views, slots, eps=eps, norm_before_gate=norm_before_gate, dtype=dtype)
