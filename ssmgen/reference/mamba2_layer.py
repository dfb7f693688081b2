"""mamba2_layer in plain PyTorch: its three operators' references, one after the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .causal_conv1d import causal_conv1d_update
from .gated_rms_norm import gated_rms_norm
from .selective_state_update import selective_state_update


def convolved(views: Mapping[str, Tensor], name: str, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """The short convolution of views[name] [batch, channels]: rounded to its dtype, as `dtype`. Moves the windows of these slots."""
    x = views[name].unsqueeze(2)
    out = torch.empty_like(x)
    given = {"x": x, "conv_state": views["conv_state"], "weight": views["conv_weight"], "bias": views.get("conv_bias")}
    causal_conv1d_update(
        **{n: t for n, t in given.items() if t is not None}, conv_state_indices=slots, out=out, silu=True, pad_slot_id=-1, dtype=dtype
    )
    return out.squeeze(2)


def slots_of(views: Mapping[str, Tensor], pad_slot_id: int) -> Tensor:
    """[batch] int64: the slot of each row, -1 for padding."""
    batch, slots = views["out"].shape[0], views["state"].shape[0]
    if "state_indices" not in views:
        return torch.arange(batch)
    found = views["state_indices"].long()
    return torch.where((found < 0) | (found >= slots) | (found == pad_slot_id), -1, found)


def mamba2_layer(
    views: Mapping[str, Tensor],
    eps: float,
    norm_before_gate: bool,
    dt_softplus: bool,
    dt_limit: tuple[float, float] | None,
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
    normed = "norm_weight" in views
    update = {n: views[n] for n in ("state", "A", "D", "dt_bias", "rand_seed") if n in views}
    update |= {
        "x": x.unflatten(1, (H, P)),
        "dt": views["dt"].unsqueeze(2).expand(-1, H, P),
        "B": B.unflatten(1, (-1, N)),
        "C": C.unflatten(1, (-1, N)),
    }
    update |= {"z": views["z"]} if "z" in views and not normed else {}
    update["A"] = views["A"][:, :, None].expand(H, P, N)
    how = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "philox_rounds": philox_rounds, "dtype": dtype}
    selective_state_update(**update, out=out, state_indices=slots, **how)
    if not normed:
        return
    live = (slots >= 0).nonzero().flatten().tolist()  # of padding, no gate is read
    for b in live:
        y, gate = (views[n][b].reshape(1, *views["norm_weight"].shape) for n in ("out", "z"))
        normal = torch.empty_like(y)
        gated_rms_norm(y, out=normal, gate=gate, weight=views["norm_weight"], eps=eps, norm_before_gate=norm_before_gate, dtype=dtype)
        out[b] = normal.reshape(out[b].shape)
