"""chunk_delta_rule in plain PyTorch: token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls import prompts
from ...engine.chunks.problem import CHUNK
from ...engine.recurrences.attention.reference import normalised
from ...engine.recurrences.reference import softplus


def decays_of(g: Tensor | None, gate: str, A_log: Tensor | None, dt_bias: Tensor | None, beta: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, HV], the factor of the state at each token."""
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


def _walk(S: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor, passed: prompts.Passed) -> tuple[Tensor, Tensor]:
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
    *, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    gate: str = "none", beta_form: str = "plain", l2norm: bool = False, scale: float = 1.0, state_layout: str = "vk", pad_slot_id: int = -1,
    dtype: torch.dtype = torch.float32, **more: Tensor,
) -> None:  # fmt: skip
    """q, k: [B, T, HK, K]; v, out: [B, T, HV, V]; g, beta: [B, T, HV]; with cu_seqlens B is 1. States: [·, HV, V, K], or [·, HV, K, V] by
    the layout "kv". Computes in `dtype`; writes out and states, each rounded once. more: `out` and the operands of sequences and states.
    """
    heads = v.shape[2]
    a, steps = decays_of(g, gate, A_log, dt_bias, beta, dtype), beta_of(beta, beta_form, dtype)

    def walk(S: Tensor, row: int, span: slice, passed: prompts.Passed) -> tuple[Tensor, Tensor]:
        Q, K = (t[row, span].to(dtype) for t in (q, k))
        Q, K = (normalised(Q), normalised(K)) if l2norm else (Q, K)
        Q, K = (t.repeat_interleave(heads // t.shape[1], 1) for t in (scale * Q, K))
        return _walk(S, Q, K, v[row, span].to(dtype), a[row, span], steps[row, span], passed)

    prompts.walked({"v": v, **more}, q.shape[3], state_layout, pad_slot_id, CHUNK, walk, dtype)
