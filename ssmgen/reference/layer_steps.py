"""What decode layers do around their recurrence, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .causal_conv1d import causal_conv1d_update
from .gated_rms_norm import gated_rms_norm


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


def normed(views: Mapping[str, Tensor], slots: Tensor, **how: Any) -> None:
    """The gated norm of `out`, in place, by groups as norm_weight [groups, size] has them. Of padding, no gate is read."""
    for b in (slots >= 0).nonzero().flatten().tolist():
        y, gate = (views[n][b].reshape(1, *views["norm_weight"].shape) for n in ("out", "z"))
        normal = torch.empty_like(y)
        gated_rms_norm(y, out=normal, gate=gate, weight=views["norm_weight"], **how)
        views["out"][b] = normal.reshape(views["out"][b].shape)
