"""selective_scan in plain PyTorch: token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls import prompts
from ...engine.recurrences.reference import softplus


def _walk(h: Tensor, u: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """(last state [D, N], y [T, D]) of one sequence: u, d [T, D]; A [D, N]; B, C [T, D, N], or [T, 1, N] if all channels share them."""
    y = torch.empty_like(u)
    for t in range(u.shape[0]):
        h = h * torch.exp(d[t, :, None] * A) + (d[t] * u[t])[:, None] * B[t]
        y[t] = (h * C[t]).sum(-1)
    return h, y


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, pad_slot_id: int = -1, dtype: torch.dtype = torch.float32,
    **more: Tensor,
) -> None:  # fmt: skip
    """u, delta, z, out: [batch, T, D], with cu_seqlens [1, tokens, D]; A: [D, N]; B, C: [batch, T, G, N]; states: [·, D, N]. Computes in
    `dtype`; writes out and states, each rounded once. more: `out` and the operands of sequences and states.
    """
    dim, d_state = A.shape
    d = delta.to(dtype) if delta_bias is None else delta.to(dtype) + delta_bias.to(dtype)
    d = softplus(d) if delta_softplus else d

    def walk(h: Tensor, row: int, span: slice, passed: prompts.Passed) -> tuple[Tensor, Tensor]:
        tokens = u[row, span].to(dtype)
        B_, C_ = (t[row, span].to(dtype).repeat_interleave(dim // t.shape[2] if t.shape[2] > 1 else 1, 1) for t in (B, C))
        last, y = _walk(h[:, 0], tokens, d[row, span], A.to(dtype), B_, C_)
        y = y if D is None else y + D.to(dtype) * tokens
        gate = None if z is None else z[row, span].to(dtype)
        return last[:, None], (y if gate is None else y * gate * torch.sigmoid(gate))[..., None]

    # Channels are heads of one row.
    states = {name: more[name].unsqueeze(2) for name in prompts.STATES if name in more}
    prompts.walked({**more, **states, "v": u[..., None], "out": more["out"][..., None]}, d_state, "vk", pad_slot_id, 1, walk, dtype)
