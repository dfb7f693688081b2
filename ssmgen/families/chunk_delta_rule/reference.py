"""chunk_delta_rule in plain PyTorch: token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..linear_attention.reference import normalised
from ..selective_state_update.reference import softplus
from .problem import CHUNK


def decays_of(g: Tensor | None, gate: str, A_log: Tensor | None, dt_bias: Tensor | None, beta: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, HV], what the state is multiplied with at each token."""
    if g is None:
        return torch.ones_like(beta, dtype=dtype)
    g = g.to(dtype)
    if gate == "linear":
        return g
    if A_log is not None:
        rate = torch.exp(A_log.to(dtype)).clamp(max=3e38)  # finite, so that rate * 0 is 0
        g = -rate * softplus(g if dt_bias is None else g + dt_bias.to(dtype))
    return torch.exp(g)


def beta_of(beta: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """[B, T, HV], how much of the error at its key a token corrects."""
    beta = beta.to(dtype)
    return beta if form == "plain" else torch.sigmoid(beta) * (2 if form == "twice_sigmoid" else 1)


def _walk(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor, passed: Callable[[int, Tensor], None]
) -> tuple[Tensor, Tensor]:
    """(last state [HV, V, K], out [T, HV, V]) of one sequence: q, k [T, HV, K], v [T, HV, V], a, beta [T, HV]. `passed` is told the state
    after each number of tokens."""
    out = torch.empty_like(v)
    for t in range(v.shape[0]):
        S = S * a[t, :, None, None]
        error = v[t] - (S * k[t, :, None]).sum(-1)
        S = S + (beta[t, :, None] * error)[..., None] * k[t, :, None]
        out[t] = (S * q[t, :, None]).sum(-1)
        passed(t + 1, S)
    return S, out


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, out: Tensor, g: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, cu_seqlens: Tensor | None = None, initial_states: Tensor | None = None,
    final_states: Tensor | None = None, state: Tensor | None = None, state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None, checkpoint_positions: Tensor | None = None, checkpoints: Tensor | None = None,
    gate: str = "none", beta_form: str = "plain", l2norm: bool = False, scale: float = 1.0, state_layout: str = "vk", pad_slot_id: int = -1,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """q, k: [B, T, HK, K]; v, out: [B, T, HV, V]; g, beta: [B, T, HV]; with cu_seqlens B is 1. States: [·, HV, V, K], or [·, HV, K, V] by
    the layout "kv". Computes in `dtype`; writes out and states, each rounded once.
    """
    heads, head_k, head_v = v.shape[2], q.shape[3], v.shape[3]
    states = (initial_states, final_states, state, checkpoints)
    if state_layout == "kv":
        initial_states, final_states, state, checkpoints = (None if t is None else t.transpose(2, 3) for t in states)
    a, steps = decays_of(g, gate, A_log, dt_bias, beta, dtype), beta_of(beta, beta_form, dtype)
    starts = None if cu_seqlens is None else cu_seqlens.tolist()
    marks: dict[int, list[int]] = {}  # rows of checkpoints by position
    for i, position in enumerate([] if checkpoint_positions is None else checkpoint_positions.tolist()):
        marks.setdefault(position, []).append(i)
    kept = final_states if state is None else state
    for s in range(v.shape[0] if starts is None else len(starts) - 1):
        row, span = (s, slice(0, v.shape[1])) if starts is None else (0, _span(starts[s], starts[s + 1], v.shape[1]))
        slot = s if state_indices is None else int(state_indices[s])
        if state is not None and not (0 <= slot < state.shape[0] and (state_indices is None or slot != pad_slot_id)):
            out[row, span] = 0
            continue
        S = v.new_zeros(heads, head_v, head_k, dtype=dtype)
        if initial_states is not None:
            S = initial_states[s].to(dtype).contiguous()
        elif state is not None and has_initial_state is not None and bool(has_initial_state[s]):
            S = state[slot].to(dtype).contiguous()
        length, first = span.stop - span.start, s * v.shape[1] if starts is None else starts[s]
        if state is not None and not length:
            continue

        def passed(count: int, S: Tensor, first: int = first, length: int = length) -> None:
            if checkpoints is not None and first + count in marks and (count % CHUNK == 0 or count == length):
                checkpoints[marks[first + count]] = S.to(checkpoints.dtype)

        Q, K = (t[row, span].to(dtype) for t in (q, k))
        Q, K = (normalised(Q), normalised(K)) if l2norm else (Q, K)
        Q, K = (t.repeat_interleave(heads // t.shape[1], 1) for t in (scale * Q, K))
        S, y = _walk(S, Q, K, v[row, span].to(dtype), a[row, span], steps[row, span], passed)
        out[row, span] = y.to(out.dtype)
        if kept is not None:
            kept[slot] = S.to(kept.dtype)


def _span(begin: int, end: int, tokens: int) -> slice:
    """The tokens of a packed sequence; one that ends before it begins, or outside of the tokens, has none."""
    return slice(begin, end) if 0 <= begin < end <= tokens else slice(0, 0)
