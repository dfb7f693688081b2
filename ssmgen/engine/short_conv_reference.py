"""The short convolution in plain PyTorch: over a run of inputs, and as a decode step on a pool of windows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .window import reach_of


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, dtype: torch.dtype, dilation: int = 1) -> Tensor:
    """inputs: [dim, (width - 1) dilation + tokens], the history first. Returns [dim, tokens], in `dtype`; the oldest tap is added first."""
    windows = inputs.unfold(1, reach_of(weight.shape[1], dilation), 1)
    return over_windows(windows[..., ::dilation], weight, bias, silu, dtype)


def over_windows(windows: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, dtype: torch.dtype) -> Tensor:
    """The same for explicit windows [dim, tokens, width], one per token."""
    total = torch.zeros(windows.shape[:2], dtype=dtype, device=windows.device)
    if bias is not None:
        total = total + bias.to(dtype)[:, None]
    for j in range(weight.shape[1]):
        total = total + weight[:, j, None].to(dtype) * windows[:, :, j].to(dtype)
    return total * torch.sigmoid(total) if silu else total


def finished(y: Tensor, rounded: torch.dtype, gate: Tensor | None, residuals: Iterable[Tensor | None]) -> Tensor:
    """y times a gate, then the residuals added one by one, as separate operations on tensors of dtype `rounded` give it."""
    if gate is not None:
        y = y.to(rounded).to(y.dtype) * gate.to(y.dtype)
    for residual in residuals:
        if residual is not None:
            y = y.to(rounded).to(y.dtype) + residual.to(y.dtype)
    return y


def valid_slot(slot: int, slots: int, pad_slot_id: int) -> bool:
    return 0 <= slot < slots and slot != pad_slot_id


def paths(count: int, width: int, parents: list[int]) -> list[list[int]]:
    """The positions of each token's window among the inputs: its ancestors, then itself. A history of width - 1 inputs precedes the
    tokens."""
    found = []
    for token in range(count):
        path, at = [token], token
        while len(path) < width:
            named = parents[at] if 0 < at < len(parents) else -1
            at = named if 0 <= named < at else at - 1
            path.insert(0, at)
        found.append([width - 1 + at for at in path])
    return found


def parents_of(first_children: Tensor, next_siblings: Tensor) -> Tensor:
    """The parent of each token, [batch, tokens]; 0 for tokens without a parent. Child and sibling links are ignored unless they name a
    later token."""
    parents = torch.zeros_like(first_children)
    for row, children, siblings in zip(parents, first_children.tolist(), next_siblings.tolist(), strict=True):
        for token, (child, sibling) in enumerate(zip(children, siblings, strict=True)):
            if token < child < len(row):
                row[child] = token
            if token < sibling < len(row):
                row[sibling] = row[token]
    return parents


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
    parents: Tensor | None = None,
    first_children: Tensor | None = None,
    next_siblings: Tensor | None = None,
    parents_out: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    residual: Tensor | None = None,
    outer_residual: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    dilation: int = 1,
    dtype: torch.dtype = torch.float32,
) -> None:
    """x, out, gates, residuals: [batch, dim, tokens], with query_start_loc [1, dim, tokens]; conv_state [slots, dim, state_len];
    weight [dim, width]; parents, first_children, next_siblings, parents_out [batch, tokens]; intermediate_conv_window
    [·, tokens, dim, width - 1]; has_initial_state [batch], where False conv_state counts as zeros. Computes in `dtype`; writes out, rounded
    once (and once more by its gate and each residual), copies of inputs, and a tree's parents.
    """
    reach, (slots, _, state_len) = reach_of(weight.shape[1], dilation), conv_state.shape
    history = reach - 1
    x = x if input_gate is None else x * input_gate
    starts = None if query_start_loc is None else query_start_loc.tolist()
    if first_children is not None and next_siblings is not None and parents_out is not None:
        parents = parents_out.copy_(parents_of(first_children, next_siblings))
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
        if has_initial_state is not None and not bool(has_initial_state[s]):
            state.zero_()
        inputs = torch.cat([state[:, entries], tokens], 1)
        windows = inputs[:, paths(count, reach, [] if parents is None else parents[s].tolist())]
        y = over_windows(windows[..., ::dilation], weight, bias, silu, dtype)
        gate, *added = (None if t is None else t[row, :, span] for t in (output_gate, residual, outer_residual))
        result.copy_(finished(y, x.dtype, gate, added))
        if intermediate_conv_window is not None:
            target = s if intermediate_state_indices is None else int(intermediate_state_indices[s])
            if 0 <= target < intermediate_conv_window.shape[0]:
                for t in range(min(count, intermediate_conv_window.shape[1])):
                    intermediate_conv_window[target, t] = windows[:, t, 1:]
        if cache_seqlens is not None:
            for t in range(count):
                state[:, (seen + t) % state_len] = tokens[:, t]
        elif num_accepted_tokens is not None:
            new = inputs[:, 1:][:, : min(history - 1 + count, state_len)]
            state[:, : new.shape[1]] = new.clone()
        else:
            state.copy_(torch.cat([state, tokens], 1)[:, count:].clone())
