"""MiniMax's functions of Lightning attention, which vLLM 0.33 and SGLang 0.5.23 have alike: one of prompts, one of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...families.chunk_scan.attention import chunk_lightning_attn
from ...families.linear_attention.call import lightning_attn
from . import delta_prompts as _prompts
from .operands import takes as _takes

_ROWS = {"q": "[B, H, T, K]", "k": "[B, H, T, K]", "v": "[B, H, T, V]"}


@_takes(**_ROWS, kv_history="[B, H, K, V]")
def lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, ed: Tensor, block_size: int = 256, kv_history: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Lightning attention over prompts, per token: S <- e^-s S + v k^T;  o = S q.

    q, k: [B, H, T, K]          v: [B, H, T, V]; one dtype, bf16, f16 or f32          ed: H elements, the slopes s, at least 0
    kv_history: [B, H, K, V], the states before the first token, which stay; None for zeros
    block_size: ignored

    Returns (output [B, H, T, V] of q's dtype, f32 states after the last token [B, H, 1, K, V]). The engines' functions also return the
    states before each block, of which their layers read only the last one.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.empty_like(v.transpose(1, 2), dtype=q.dtype, memory_format=torch.contiguous_format)
    final = _prompts.states_of(q, v, v.shape[0])
    before = None if kv_history is None else kv_history.transpose(-1, -2)
    _prompts.run(chunk_lightning_attn, (q, k, v, ed.reshape(-1)), out.transpose(1, 2), initial_states=before, last=final, scale=1.0)
    return out, final.transpose(-1, -2).unsqueeze(2)


@_takes(q="[B, H, 1, K]", k="[B, H, 1, K]", v="[B, H, 1, V]", kv_caches="[slots, H, K, V]", slot_idx="[B]")
def linear_decode_forward_triton(
    q: Tensor, k: Tensor, v: Tensor, kv_caches: Tensor, slope_rate: Tensor, slot_idx: Tensor, BLOCK_SIZE: int = 32
) -> Tensor:
    """One decode step of Lightning attention: S <- e^-s S + v k^T;  o = S q.

    q, k: [B, H, 1, K]          v: [B, H, 1, V]          slope_rate: H elements, the slopes s, at least 0
    kv_caches: [slots, H, K, V], a pool, updated in place
    slot_idx: [B], slots; a negative one, or one out of the pool, is padding: a zero output, and no state is touched
    BLOCK_SIZE: ignored

    Returns output [B, H V] of q's dtype.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    if problems := [f"{n} is {list(t.shape)}; expected one token" for n, t in (("q", q), ("k", k), ("v", v)) if t.shape[2] != 1]:
        raise ArgumentError("linear_decode_forward_triton", problems)
    out = torch.empty((v.shape[0], v.shape[1], v.shape[3]), dtype=q.dtype, device=v.device)
    lightning_attn(
        kv_caches, q[:, :, 0], k[:, :, 0], v[:, :, 0], slope_rate.reshape(-1), scale=1.0, state_layout="kv", state_indices=slot_idx, out=out
    )
    return out.flatten(1)


def scatter(pool: Tensor, slots: Tensor, states: Tensor) -> None:
    """Writes states to their slots of a pool, without the host. A row without a slot repeats the write of the first row that has one."""
    if not pool.shape[0] or not slots.shape[0]:
        return
    there = (slots >= 0) & (slots < pool.shape[0])
    rows = torch.where(there, torch.arange(slots.shape[0], device=slots.device), there.int().argmax())
    place = slots[rows].clamp(0, pool.shape[0] - 1).long()
    pool.index_copy_(0, place, torch.where(there.any(), states[rows], pool[place]))
