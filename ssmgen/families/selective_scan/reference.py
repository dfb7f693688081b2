"""selective_scan in plain PyTorch: token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def _softplus(v: Tensor) -> Tensor:
    return v.clamp(min=0) + torch.log1p(torch.exp(-v.abs()))


def _walk(h: Tensor, u: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """(last state [D, N], y [T, D]) of one sequence: u, d [T, D]; A [D, N]; B, C [T, D, N], or [T, 1, N] if all channels share them."""
    y = torch.empty_like(u)
    for t in range(u.shape[0]):
        h = h * torch.exp(d[t, :, None] * A) + (d[t] * u[t])[:, None] * B[t]
        y[t] = (h * C[t]).sum(-1)
    return h, y


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *, out: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None, final_states: Tensor | None = None, state: Tensor | None = None,
    state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, pad_slot_id: int = -1,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """u, delta, z, out: [batch, T, D], with cu_seqlens [1, tokens, D]; A: [D, N]; B, C: [batch, T, G, N]; states: [·, D, N]. Computes in
    `dtype`; writes out and states, each rounded once.
    """
    dim, d_state = A.shape
    d = delta.to(dtype) if delta_bias is None else delta.to(dtype) + delta_bias.to(dtype)
    d = _softplus(d) if delta_softplus else d
    starts = None if cu_seqlens is None else cu_seqlens.tolist()
    kept = final_states if state is None else state
    for s in range(u.shape[0] if starts is None else len(starts) - 1):
        row, span = (s, slice(None)) if starts is None else (0, _span(starts[s], starts[s + 1], u.shape[1]))
        slot = s if state_indices is None else int(state_indices[s])
        if state is not None and not (0 <= slot < state.shape[0] and (state_indices is None or slot != pad_slot_id)):
            out[row, span] = 0
            continue
        h = u.new_zeros(dim, d_state, dtype=dtype)
        if initial_states is not None:
            h = initial_states[s].to(dtype)
        elif state is not None and has_initial_state is not None and bool(has_initial_state[s]):
            h = state[slot].to(dtype)
        tokens = u[row, span].to(dtype)
        if state is not None and tokens.shape[0] == 0:
            continue
        B_, C_ = (t[row, span].to(dtype).repeat_interleave(dim // t.shape[2] if t.shape[2] > 1 else 1, 1) for t in (B, C))
        h, y = _walk(h, tokens, d[row, span], A.to(dtype), B_, C_)
        y = y if D is None else y + D.to(dtype) * tokens
        gate = None if z is None else z[row, span].to(dtype)
        out[row, span] = (y if gate is None else y * gate * torch.sigmoid(gate)).to(out.dtype)
        if kept is not None:
            kept[slot] = h.to(kept.dtype)


def _span(begin: int, end: int, tokens: int) -> slice:
    """The tokens of a packed sequence; a sequence that ends before it begins, or outside of the tokens, has none."""
    return slice(begin, end) if 0 <= begin < end <= tokens else slice(0, 0)
