"""chunk_scan in plain PyTorch: token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _softplus(v: Tensor) -> Tensor:
    return v.clamp(min=0) + torch.log1p(torch.exp(-v.abs()))


def _walk(
    h: Tensor, x: Tensor, d: Tensor, decays: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, fresh: Tensor | None,
    passed: Callable[[int, Tensor], None],
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
    x: Tensor, dt: Tensor | None, A: Tensor | None, B: Tensor, C: Tensor, *, out: Tensor, g: Tensor | None = None,
    D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, final_states: Tensor | None = None, state: Tensor | None = None,
    state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, pad_slot_id: int = -1,
    checkpoint_positions: Tensor | None = None, checkpoints: Tensor | None = None, scale: float = 1.0, slope: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """x, z, out: [batch, T, H, P], with cu_seqlens [1, tokens, H, P]; dt: [batch, T, H]; B, C: [batch, T, G, N]; D: [H, P]; seq_idx:
    [batch, T]; states: [·, H, P, N]. Without dt and A, g: [batch, T, H] or [H], a log decay (slope: minus one). Computes in `dtype`;
    writes out and states, each rounded once.
    """
    heads, headdim, d_state = x.shape[2], x.shape[3], B.shape[3]
    if dt is not None and A is not None:
        d = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
        d = _softplus(d) if dt_softplus else d
        d = d if dt_limit is None else d.clamp(*dt_limit)
        decays = torch.exp(d * A.to(dtype))
    else:
        d = x.new_ones(x.shape[:3], dtype=dtype)
        decays = d if g is None else torch.exp(-g.to(dtype) if slope else g.to(dtype)).expand(d.shape)
    skip = None if D is None else D.to(dtype)
    starts = None if cu_seqlens is None else cu_seqlens.tolist()
    fresh = None if seq_idx is None else torch.cat([torch.zeros_like(seq_idx[:, :1]), seq_idx.diff(dim=1)], 1) != 0
    marks: dict[int, list[int]] = {}  # rows of checkpoints by position
    for i, position in enumerate([] if checkpoint_positions is None else checkpoint_positions.tolist()):
        marks.setdefault(position, []).append(i)
    kept = final_states if state is None else state
    for s in range(x.shape[0] if starts is None else len(starts) - 1):
        row, span = (s, slice(None)) if starts is None else (0, _span(starts[s], starts[s + 1], x.shape[1]))
        slot = s if state_indices is None else int(state_indices[s])
        if state is not None and not (0 <= slot < state.shape[0] and (state_indices is None or slot != pad_slot_id)):
            out[row, span] = 0
            continue
        h = x.new_zeros(heads, headdim, d_state, dtype=dtype)
        if initial_states is not None:
            h = initial_states[s].to(dtype)
        elif state is not None and has_initial_state is not None and bool(has_initial_state[s]):
            h = state[slot].to(dtype)
        if state is not None and x[row, span].shape[0] == 0:
            continue
        B_, C_ = (t[row, span].to(dtype).repeat_interleave(heads // t.shape[2], 1) for t in (B, C))
        gate = None if z is None else z[row, span].to(dtype)
        first = s * x.shape[1] if starts is None else starts[s]

        def passed(count: int, h: Tensor, first: int = first) -> None:
            if checkpoints is not None and first + count in marks:
                checkpoints[marks[first + count]] = h.to(checkpoints.dtype)

        own = None if fresh is None else fresh[row]
        h, y = _walk(h, x[row, span].to(dtype), d[row, span], decays[row, span], B_, scale * C_, skip, gate, own, passed)
        out[row, span] = y.to(out.dtype)
        if kept is not None:
            kept[slot] = h.to(kept.dtype)


def _span(begin: int, end: int, tokens: int) -> slice:
    """The tokens of a packed sequence; a sequence that ends before it begins, or outside of the tokens, has none."""
    return slice(begin, end) if 0 <= begin < end <= tokens else slice(0, 0)
