"""decode_attention in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def _normed(x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool) -> Tensor:
    if weight is None:
        return x
    factor = 1 + weight.to(x.dtype) if unit_offset else weight.to(x.dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * factor


def _rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """x: [heads, head_dim]; cos, sin: [rotary]. Channel i turns with channel i + rotary / 2."""
    if cos is None or sin is None:
        return x
    turned, rest = x[:, : cos.shape[0]], x[:, cos.shape[0] :]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos.to(x.dtype) + torch.cat([-high, low], dim=-1) * sin.to(x.dtype)
    return torch.cat([turned, rest], dim=-1)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor, *, out: Tensor,
    cos: Tensor | None = None, sin: Tensor | None = None, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    gate: Tensor | None = None, eps: float = 1e-6, unit_offset: bool = False, key_scale: float = 1.0, scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Shapes as in the public function, with a row of cos and sin for each sequence. Computes in `dtype`; writes the caches and out, each
    rounded once. The attention is of the keys and values as the caches store them."""
    room, kv_heads = key_cache.shape[2], k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for b, at in enumerate(position.tolist()):
        if not 0 <= at < room:
            out[b] = 0
            continue
        turn = (None, None) if cos is None or sin is None else (cos[b], sin[b])
        query = _rotated(_normed(q[b].to(dtype), q_norm, eps, unit_offset), *turn)
        key = _rotated(_normed(k[b].to(dtype), k_norm, eps, unit_offset) * key_scale, *turn)
        key_cache[b, :, at], value_cache[b, :, at] = key.to(key_cache.dtype), v[b].to(value_cache.dtype)
        keys, values = (t[b, :, : at + 1].to(dtype) for t in (key_cache, value_cache))
        scores = torch.einsum("hgd,hjd->hgj", query.unflatten(0, (kv_heads, -1)), keys) * scale
        y = torch.einsum("hgj,hjd->hgd", scores.softmax(dim=-1), values).flatten(0, 1)
        out[b] = (y if gate is None else y * torch.sigmoid(gate[b].to(dtype))).to(out.dtype)
