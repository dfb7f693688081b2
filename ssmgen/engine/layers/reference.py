"""The convolution and the norm of decode layers in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..norm_reference import gated_norm
from ..short_conv_reference import step


def convolved(views: Mapping[str, Tensor], name: str, slots: Tensor, dtype: torch.dtype, update: bool = True) -> Tensor:
    """The short convolution of views[name] [batch(, tokens), channels]: rounded to its dtype, returned as `dtype`.

    Updates the windows of these slots, unless `update` is False. If there is a buffer for windows after each token, it is written.
    """
    x = views[name]
    x = x.unsqueeze(2) if x.dim() == 2 else x.transpose(1, 2)
    out = torch.empty_like(x)
    window = views["conv_state"] if update else views["conv_state"].clone()
    given: dict[str, Any] = {"x": x, "conv_state": window, "weight": views["conv_weight"], "bias": views.get("conv_bias")}
    kept = ("intermediate_conv_window", "intermediate_state_indices") if "intermediate_conv_window" in views else ()
    given |= {n: views.get(n) for n in ("num_accepted_tokens", *kept)}
    given = {n: t for n, t in given.items() if t is not None}
    step(**given, conv_state_indices=slots, out=out, silu=True, pad_slot_id=-1, dtype=dtype)
    return out.squeeze(2) if views[name].dim() == 2 else out.transpose(1, 2)


def slots_of(views: Mapping[str, Tensor], pad_slot_id: int) -> Tensor:
    """[batch] int64: the slot of each row's window, -1 for padding. Its state has the same slot, unless accepted tokens select it."""
    batch = views["out"].shape[0]
    if "state_indices" not in views:
        return torch.arange(batch)
    found = valid_slots(views, views["state_indices"], pad_slot_id)
    if "num_accepted_tokens" not in views:
        return found
    count, most = views["num_accepted_tokens"].long(), views["conv_state"].shape[2] - views["conv_weight"].shape[1] + 2
    in_range = (count >= 1) & (count <= min(found.shape[1], most))
    source = found.gather(1, torch.where(in_range, count - 1, 0)[:, None])[:, 0]
    return torch.where(in_range & (source >= 0), found[:, 0], -1)


def valid_slots(views: Mapping[str, Tensor], slots: Tensor, pad_slot_id: int) -> Tensor:
    """The slots as int64, with -1 for invalid ones."""
    found = slots.long()
    return torch.where((found < 0) | (found >= views["state"].shape[0]) | (found == pad_slot_id), -1, found)


def located(views: Mapping[str, Tensor], slots: Tensor, pad_slot_id: int) -> dict[str, Tensor]:
    """The recurrence's operands that say where states come from and go to. slots: of the windows, as in `slots_of`."""
    names: tuple[str, ...] = ("num_accepted_tokens", "intermediate_states", "rand_seed")
    names += ("intermediate_state_indices",) if "intermediate_states" in views else ()
    found = {"state_indices": slots, **{name: views[name] for name in names if name in views}}
    if "num_accepted_tokens" in views:
        columns = valid_slots(views, views["state_indices"], pad_slot_id)
        found["state_indices"] = torch.where(slots[:, None] < 0, -1, columns)
        found["dst_state_indices"] = valid_slots(views, views["dst_state_indices"], pad_slot_id)
    return found


def normed(views: Mapping[str, Tensor], slots: Tensor, **how: Any) -> None:
    """The gated norm of `out`, in place, with the groups of norm_weight [groups, size]. The gate of padded rows is not read."""
    for b in (slots >= 0).nonzero().flatten().tolist():
        y, gate = (views[n][b].reshape(-1, *views["norm_weight"].shape) for n in ("out", "z"))  # a row per token
        normal = torch.empty_like(y)
        gated_norm(y, out=normal, gate=gate, weight=views["norm_weight"], **how)
        views["out"][b] = normal.reshape(views["out"][b].shape)
