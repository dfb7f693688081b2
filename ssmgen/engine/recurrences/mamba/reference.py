"""Decode steps of Mamba in plain PyTorch, in the order in which the kernels compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..reference import softplus, stepped


def one_token(
    h: Tensor, token: Mapping[str, Tensor], weights: Mapping[str, Tensor], dt_softplus: bool, dt_limit: Any
) -> tuple[Tensor, Tensor]:
    """(new state [H, P, N], output [H, P]) of one sequence's token: x, dt, z [H, P], B, C [G, N], all in the state's dtype."""
    step, x = token["dt"], token["x"]
    if "dt_bias" in weights:
        step = step + weights["dt_bias"]
    if dt_softplus:
        step = softplus(step)
    if dt_limit is not None:
        step = step.clamp(*dt_limit)
    B, C = (token[n].repeat_interleave(x.shape[0] // token[n].shape[0], 0)[:, None] for n in ("B", "C"))  # [H, 1, N]
    new = h * torch.exp(step[..., None] * weights["A"]) + (step * x)[..., None] * B
    y = (new * C).sum(-1)
    if "D" in weights:
        y = y + weights["D"] * x
    if "z" in token:
        y = y * token["z"] * torch.sigmoid(token["z"])
    return new, y


def reference(
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    pad_slot_id: int = -1,
    philox_rounds: int = 0,
    update_state: bool = True,
    zero_padding: bool = True,
    dtype: torch.dtype = torch.float32,
    **views: Tensor,
) -> None:
    """Operands in the headed form: state [slots, H, P, N]; x, dt, z, out [batch, H, P]; A [H, P, N]; B, C [batch, G, N];
    D, dt_bias [H, P]; rand_seed [slots]; state_scale [slots, H, P].

    Several tokens: x, dt, z, out [batch, T, H, P]; B, C [batch, T, G, N]; intermediate_states [rows, T, H, P, N]; parents [batch, T]; with
    cu_seqlens, batch is 1 and T counts the tokens of all sequences. Computes in `dtype`, and rounds as in `stepped`.
    """
    if views["x"].dim() == 3:
        views |= {n: views[n].unsqueeze(1) for n in ("x", "dt", "z", "out", "B", "C") if n in views}
    weights: dict[str, Tensor] = {n: views[n].to(dtype) for n in ("A", "D", "dt_bias") if n in views}

    def token(h: Tensor, row: int, t: int, slot: int, i: int) -> tuple[Tensor, Tensor]:
        x: dict[str, Tensor] = {n: views[n][row, t].to(dtype) for n in ("x", "dt", "z", "B", "C") if n in views}
        return one_token(h, x, weights, dt_softplus, dt_limit)

    how: dict[str, Any] = {"update_state": update_state, "zero_padding": zero_padding, "dtype": dtype}
    stepped(views, token, pad_slot_id=pad_slot_id, philox_rounds=philox_rounds, **how)
