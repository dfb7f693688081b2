"""Decode steps of Mamba in plain PyTorch, in the order in which the kernels compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...narrow_reference import narrowed, widened
from ...stochastic_reference import stored
from ..reference import softplus, start_slot


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
    cu_seqlens, batch is 1 and T counts the tokens of all sequences. Computes in `dtype`; carries the state through a call's tokens
    unrounded; writes states and out, each rounded once, states stochastically if there is a seed.
    """
    if views["x"].dim() == 3:
        views |= {n: views[n].unsqueeze(1) for n in ("x", "dt", "z", "out", "B", "C") if n in views}
    state, out, target = views["state"], views["out"], views.get("dst_state_indices")
    kept, parents = views.get("intermediate_states"), views.get("parents")
    scales, kept_scales = views.get("state_scale"), views.get("intermediate_state_scales")
    starts = views["cu_seqlens"].tolist() if "cu_seqlens" in views else None
    weights: dict[str, Tensor] = {n: views[n].to(dtype) for n in ("A", "D", "dt_bias") if n in views}

    def valid(slot: int) -> bool:
        return 0 <= slot < state.shape[0] and ("state_indices" not in views or slot != pad_slot_id)

    def keep(where: Tensor, at: Any, h: Tensor, scales: Tensor | None, of: int, stream: int = 0) -> None:
        """Stores a state in a slot, or in a column of a row, with its scales if there are any, and with the noise of slot `of`."""
        seed = int(views["rand_seed"][of]) if philox_rounds else 0
        if scales is None:
            where[at] = stored(h, where.dtype, seed, philox_rounds, of, stream)
        else:
            where[at], scales[at] = narrowed(h, where.dtype, seed, philox_rounds, of, stream)

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
        h = widened(state[slot], None if scales is None else scales[slot], dtype)
        results = []
        for i, t in enumerate(span):
            parent = int(parents[b, i]) if parents is not None and i < parents.shape[1] else -1
            if rows is not None and 0 <= parent < min(i, rows.shape[1]):
                h = widened(rows[row_kept, parent], None if kept_scales is None else kept_scales[row_kept, parent], dtype)
            token: dict[str, Tensor] = {n: views[n][row, t].to(dtype) for n in ("x", "dt", "z", "B", "C") if n in views}
            h, y = one_token(h, token, weights, dt_softplus, dt_limit)
            results.append(y)
            if rows is not None and i < rows.shape[1]:
                keep(rows, (row_kept, i), h, kept_scales, slot, 1 + i)
            if update_state and target is not None and target.dim() == 2 and i < target.shape[1] and valid(int(target[b, i])):
                keep(state, int(target[b, i]), h, scales, int(target[b, i]))
        last = slot if target is None else int(target[b]) if target.dim() == 1 else -1
        if update_state and valid(last):
            keep(state, last, h, scales, last)
        if results:
            out[row, span.start : span.stop] = torch.stack(results).to(out.dtype)
