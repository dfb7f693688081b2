"""The short convolution in plain PyTorch: of a run of inputs, and its decode step on a pool of windows."""

from __future__ import annotations

import torch
from torch import Tensor


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, dtype: torch.dtype) -> Tensor:
    """inputs: [dim, width - 1 + tokens], the history first. Returns [dim, tokens], in `dtype`; the oldest tap is added first."""
    width = weight.shape[1]
    tokens = inputs.shape[1] - width + 1
    total = torch.zeros(inputs.shape[0], tokens, dtype=dtype, device=inputs.device)
    if bias is not None:
        total = total + bias.to(dtype)[:, None]
    for j in range(width):
        total = total + weight[:, j, None].to(dtype) * inputs[:, j : j + tokens].to(dtype)
    return total * torch.sigmoid(total) if silu else total


def valid_slot(slot: int, slots: int, pad_slot_id: int) -> bool:
    return 0 <= slot < slots and slot != pad_slot_id


def step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    silu: bool = False,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    dtype: torch.dtype = torch.float32,
) -> None:
    """x, out: [batch, dim, tokens], with query_start_loc [1, dim, tokens]; conv_state [slots, dim, state_len]; weight [dim, width];
    intermediate_conv_window [·, tokens, dim, width - 1]. Computes in `dtype`; writes out, rounded once, and copies of inputs.
    """
    width, (slots, _, state_len) = weight.shape[1], conv_state.shape
    history = width - 1
    starts = None if query_start_loc is None else query_start_loc.tolist()
    for s in range(x.shape[0] if starts is None else len(starts) - 1):
        row, span = (s, slice(None)) if starts is None else (0, slice(starts[s], starts[s + 1]))
        tokens, result = x[row, :, span].clone(), out[row, :, span]
        count = tokens.shape[1]
        slot = s if conv_state_indices is None else int(conv_state_indices[s])
        valid = conv_state_indices is None or valid_slot(slot, slots, pad_slot_id)
        begin = state_len - history
        if num_accepted_tokens is not None:
            begin = int(num_accepted_tokens[s]) - 1
            valid = valid and 0 <= begin <= state_len - history
        if not valid or count == 0:
            result.zero_()
            continue
        entries = torch.arange(begin, begin + history)
        if cache_seqlens is not None:
            seen = int(cache_seqlens[s])
            entries = (seen - history + torch.arange(history)) % state_len
        state = conv_state[slot]
        inputs = torch.cat([state[:, entries], tokens], 1)
        result.copy_(convolve(inputs, weight, bias, silu, dtype))
        if intermediate_conv_window is not None:
            target = s if intermediate_state_indices is None else int(intermediate_state_indices[s])
            if 0 <= target < intermediate_conv_window.shape[0]:
                for t in range(min(count, intermediate_conv_window.shape[1])):
                    intermediate_conv_window[target, t] = inputs[:, t + 1 : t + width]
        if cache_seqlens is not None:
            for t in range(count):
                state[:, (seen + t) % state_len] = tokens[:, t]
        elif num_accepted_tokens is not None:
            new = inputs[:, 1:][:, : min(history - 1 + count, state_len)]
            state[:, : new.shape[1]] = new.clone()
        else:
            state.copy_(torch.cat([state, tokens], 1)[:, count:].clone())
