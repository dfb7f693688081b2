"""Functions that the references of all recurrences use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..narrow_reference import narrowed, widened
from ..stochastic_reference import stored

# (state [heads, rows, n], row of the batch, token in it, slot, number in its sequence) -> (new state, output [heads, rows])
Token = Callable[[Tensor, int, int, int, int], tuple[Tensor, Tensor]]


def softplus(v: Tensor) -> Tensor:
    """log(1 + e^v), accurate where v is very negative and without overflow where it is large."""
    return v.clamp(min=0) + torch.log1p(torch.exp(-v.abs()))


def start_slot(views: Mapping[str, Tensor], b: int) -> int:
    """Where sequence b starts from; -1 if its count of accepted tokens is out of range."""
    if "state_indices" not in views:
        return b
    indices = views["state_indices"][b]
    if "num_accepted_tokens" not in views:
        return int(indices)
    accepted = int(views["num_accepted_tokens"][b])
    return int(indices[accepted - 1]) if 1 <= accepted <= indices.shape[0] else -1


def stepped(
    views: Mapping[str, Tensor], token: Token, *, pad_slot_id: int, philox_rounds: int, update_state: bool, zero_padding: bool,
    dtype: torch.dtype, keys_first: bool = False,
) -> None:  # fmt: skip
    """Decode steps of all sequences of a call; `token` computes one. Carries the state through a call's tokens unrounded; writes states and
    out, each rounded once, states stochastically if there is a seed.

    views: state [slots, heads, rows, n], out [batch, T, heads, rows], and operands that locate states; with cu_seqlens, batch is 1 and T
    counts the tokens of all sequences. keys_first: the order of a state's elements in memory, which numbers them for the noise.
    """
    state, out, target = views["state"], views["out"], views.get("dst_state_indices")
    kept, parents = views.get("intermediate_states"), views.get("parents")
    scales, kept_scales = views.get("state_scale"), views.get("intermediate_state_scales")
    starts = views["cu_seqlens"].tolist() if "cu_seqlens" in views else None

    def valid(slot: int) -> bool:
        return 0 <= slot < state.shape[0] and ("state_indices" not in views or slot != pad_slot_id)

    def keep(where: Tensor, at: Any, S: Tensor, scales: Tensor | None, of: int, stream: int = 0) -> None:
        """Stores a state in a slot, or in a column of a row, with its scales if there are any, and with the noise of slot `of`."""
        seed = int(views["rand_seed"][of]) if philox_rounds else 0
        if scales is None:
            found = stored(S.transpose(1, 2) if keys_first else S, where.dtype, seed, philox_rounds, of, stream)
            where[at] = found.transpose(1, 2) if keys_first else found
        else:
            where[at], scales[at] = narrowed(S, where.dtype, seed, philox_rounds, of, stream)

    for b in range(out.shape[0] if starts is None else len(starts) - 1):
        row, span = (b, range(out.shape[1])) if starts is None else (0, range(starts[b], starts[b + 1]))
        if starts is not None and not (0 <= starts[b] < starts[b + 1] <= out.shape[1]):
            continue
        slot, row_kept = start_slot(views, b), int(views["intermediate_state_indices"][b]) if "intermediate_state_indices" in views else b
        rows = kept if kept is not None and 0 <= row_kept < kept.shape[0] else None
        if not valid(slot) or (parents is not None and rows is None):
            if zero_padding:
                out[row, span.start : span.stop] = 0
            continue
        S = widened(state[slot], None if scales is None else scales[slot], dtype)
        results = []
        for i, t in enumerate(span):
            parent = int(parents[b, i]) if parents is not None and i < parents.shape[1] else -1
            if rows is not None and 0 <= parent < min(i, rows.shape[1]):
                S = widened(rows[row_kept, parent], None if kept_scales is None else kept_scales[row_kept, parent], dtype)
            S, y = token(S, row, t, slot, i)
            results.append(y)
            if rows is not None and i < rows.shape[1]:
                keep(rows, (row_kept, i), S, kept_scales, slot, 1 + i)
            if update_state and target is not None and target.dim() == 2 and i < target.shape[1] and valid(int(target[b, i])):
                keep(state, int(target[b, i]), S, scales, int(target[b, i]))
        last = slot if target is None else int(target[b]) if target.dim() == 1 else -1
        if update_state and valid(last):
            keep(state, last, S, scales, last)
        if results:
            out[row, span.start : span.stop] = torch.stack(results).to(out.dtype)
