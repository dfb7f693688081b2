"""chunk_scan in plain PyTorch: token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls import prompts
from ...engine.recurrences.reference import softplus


def _walk(
    h: Tensor, x: Tensor, d: Tensor, decays: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, fresh: Tensor | None,
    passed: prompts.Passed,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(last state [H, P, N], y [T, H, P]) of one sequence: x, z [T, H, P], d, decays [T, H], B, C [T, H, N], D [H, P]; fresh: [T], tokens
    at which the state restarts. `passed` is told the state after each number of tokens."""
    y = torch.empty_like(x)
    for t in range(x.shape[0]):
        if fresh is not None and bool(fresh[t]):
            h = torch.zeros_like(h)
        h = h * decays[t, :, None, None] + (d[t, :, None] * x[t])[..., None] * B[t, :, None]
        y[t] = (h * C[t, :, None]).sum(-1)
        passed(t + 1, h)
    if D is not None:
        y = y + D * x
    return h, y if z is None else y * z * torch.sigmoid(z)


def chunk_scan(
    x: Tensor, dt: Tensor | None, A: Tensor | None, B: Tensor, C: Tensor, *, g: Tensor | None = None, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] | None = None,
    seq_idx: Tensor | None = None, pad_slot_id: int = -1, scale: float = 1.0, slope: bool = False, dtype: torch.dtype = torch.float32,
    **more: Tensor,
) -> None:  # fmt: skip
    """x, z, out: [batch, T, H, P], with cu_seqlens [1, tokens, H, P]; dt: [batch, T, H]; B, C: [batch, T, G, N]; D: [H, P]; seq_idx:
    [batch, T]; states: [·, H, P, N]. Without dt and A, g: [batch, T, H] or [H], a log decay (slope: minus one). Computes in `dtype`;
    writes out and states, each rounded once. more: `out` and the operands of sequences and states.
    """
    heads = x.shape[2]
    if dt is not None and A is not None:
        d = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
        d = softplus(d) if dt_softplus else d
        d = d if dt_limit is None else d.clamp(*dt_limit)
        decays = torch.exp(d * A.to(dtype))
    else:
        d = x.new_ones(x.shape[:3], dtype=dtype)
        decays = d if g is None else torch.exp(-g.to(dtype) if slope else g.to(dtype)).expand(d.shape)
    skip = None if D is None else D.to(dtype)
    fresh = None if seq_idx is None else torch.cat([torch.zeros_like(seq_idx[:, :1]), seq_idx.diff(dim=1)], 1) != 0

    def walk(h: Tensor, row: int, span: slice, passed: prompts.Passed) -> tuple[Tensor, Tensor]:
        B_, C_ = (t[row, span].to(dtype).repeat_interleave(heads // t.shape[2], 1) for t in (B, C))
        gate, own = None if z is None else z[row, span].to(dtype), None if fresh is None else fresh[row]
        return _walk(h, x[row, span].to(dtype), d[row, span], decays[row, span], B_, scale * C_, skip, gate, own, passed)

    prompts.walked({"v": x, **more}, B.shape[3], "vk", pad_slot_id, 1, walk, dtype)
