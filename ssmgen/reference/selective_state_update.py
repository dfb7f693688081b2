"""selective_state_update in plain PyTorch, in the order in which the kernels compute."""

from __future__ import annotations

import torch
from torch import Tensor


def softplus(v: Tensor) -> Tensor:
    """log(1 + e^v), accurate where v is very negative and without overflow where it is large."""
    return v.clamp(min=0) + torch.log1p(torch.exp(-v.abs()))


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    *,
    dt_limit: tuple[float, float] | None = None,
    state_indices: Tensor | None = None,
    dst_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Operands in the headed form: state [slots, H, P, N]; x, dt, z, out [batch, H, P]; A [H, P, N]; B, C [batch, G, N];
    D, dt_bias [H, P]. Computes in `dtype`; writes `state` and `out`, each rounded once.
    """
    heads_per_group = x.shape[1] // B.shape[1]
    for b in range(x.shape[0]):
        src = b if state_indices is None else int(state_indices[b])
        dst = src if dst_state_indices is None else int(dst_state_indices[b])
        if not 0 <= src < state.shape[0] or (state_indices is not None and src == pad_slot_id):
            out[b] = 0
            continue
        step = dt[b].to(dtype)
        if dt_bias is not None:
            step = step + dt_bias.to(dtype)
        if dt_softplus:
            step = softplus(step)
        if dt_limit is not None:
            step = step.clamp(*dt_limit)
        x_b = x[b].to(dtype)
        B_b, C_b = (t[b].to(dtype).repeat_interleave(heads_per_group, 0) for t in (B, C))  # [H, N]
        new = state[src].to(dtype) * torch.exp(step[..., None] * A.to(dtype)) + (step * x_b)[..., None] * B_b[:, None]
        y = (new * C_b[:, None]).sum(-1)  # of the new state before it is rounded
        if D is not None:
            y = y + D.to(dtype) * x_b
        if z is not None:
            z_b = z[b].to(dtype)
            y = y * z_b * torch.sigmoid(z_b)
        if 0 <= dst < state.shape[0] and not (dst_state_indices is not None and dst == pad_slot_id):
            state[dst] = new.to(state.dtype)
        out[b] = y.to(out.dtype)
