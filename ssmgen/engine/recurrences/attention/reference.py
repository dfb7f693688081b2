"""Linear attention in plain PyTorch: the recurrences as they are written, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..reference import softplus, stepped
from .operands import OF_KEY_HEADS, RINGED, ROLES, WEIGHTS

NORM_EPSILON = 1e-6


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


def log_decay(g: Tensor, form: Any, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float) -> Tensor:
    """The log decay that an operand g or gk stands for; A_log and dt_bias broadcast against it."""
    if form.gate in ("log", "slope"):
        return g if form.gate == "log" else -g
    biased = g if dt_bias is None else g + dt_bias
    rate = None if A_log is None else torch.exp(A_log).clamp(max=3e38)  # finite, so that rate * 0 is 0
    if form.gate == "softplus":
        assert rate is not None, "this form has an A_log"
        return -rate * softplus(biased)
    return lower_bound * torch.sigmoid(biased if rate is None else rate * biased)


def step_size(beta: Tensor, form: Any) -> Tensor:
    """The step size that an operand beta stands for."""
    return beta if form.beta == "plain" else torch.sigmoid(beta) * (2 if form.beta == "twice_sigmoid" else 1)


def one_token(S: Tensor, x: Mapping[str, Tensor], form: Any, scale: float, lower_bound: float) -> tuple[Tensor, Tensor]:
    """(new state [HV, V, K], output [HV, V]) of one sequence's token; `x` in the state's dtype, key heads already repeated."""
    q, k, v = x["q"], x["k"], x["v"]
    read = x.get("read", k)
    if form.l2norm:
        q, k, read = normalised(q), normalised(k), normalised(read)
    read = read * x["erase"] if "erase" in x else read
    A_log, dt_bias = x.get("A_log"), x.get("dt_bias")
    D = torch.ones_like(S)
    if "gk" in x:
        log = log_decay(x["gk"], form, None if A_log is None else A_log[:, None], dt_bias, lower_bound)
        log = log + x["g"][:, None] if "g" in x else log
        D = D * torch.exp(log)[:, None, :]
    elif "g" in x:
        D = D * torch.exp(log_decay(x["g"], form, A_log, dt_bias, lower_bound))[:, None, None]
    if "gv" in x:
        D = D * torch.exp(x["gv"])[:, :, None]
    if "bonus" in x:
        before = S + v[:, :, None] * (k * x["bonus"])[:, None, :]
        return D * S + v[:, :, None] * k[:, None, :], torch.einsum("hvk,hk->hv", before, q) * scale
    held = torch.einsum("hvk,hk->hv", S if form.delta == "old" else D * S, read)
    if "write" in x or "alpha" in x:
        write = x["write"] if "write" in x else -(read * x["alpha"])
        S = D * S + held[:, :, None] * write[:, None, :] + v[:, :, None] * k[:, None, :]
    else:
        e = v * x["w"] if "w" in x else v
        if form.delta != "none":
            e = e - held
        if "beta" in x:
            beta = step_size(x["beta"], form)
            e = e * (beta if beta.dim() == 2 else beta[:, None])
        S = D * S + e[:, :, None] * k[:, None, :]
    return S, torch.einsum("hvk,hk->hv", S, q) * scale


def _ready(name: str, value: Tensor, form: Any, weights: Mapping[str, Tensor], lower_bound: float) -> Tensor:
    """The log decay or the step size that an operand g, gk or beta stands for."""
    if name == "beta":
        return step_size(value, form)
    A_log, bias = weights.get("A_log"), weights.get("dt_bias")
    return log_decay(value, form, A_log if A_log is None or name == "g" else A_log[:, None], bias, lower_bound)


def replay(
    views: Mapping[str, Tensor], form: Any, scale: float, lower_bound: float, pad_slot_id: int, zero_padding: bool, dtype: torch.dtype
) -> None:
    """One token per sequence, of states that lack the ring_position oldest tokens of their ring: ring_k [slots, L, HK, K], keys divided by
    their norm; ring_v [slots, L, HV, V], errors; ring_g [slots, L, HV] or ring_gk [slots, L, HV, K], log decays."""
    state, ring_k, ring_v, out = views["state"], views["ring_k"], views["ring_v"], views["out"]
    name = "gk" if "gk" in views else "g"
    ring_g, heads, length = views[f"ring_{name}"], state.shape[1], ring_k.shape[1]
    weights = {n: views[n].to(dtype) for n in WEIGHTS if n in views}

    def of_heads(keys: Tensor) -> Tensor:
        return keys.to(dtype).repeat_interleave(heads // keys.shape[0], 0)

    def decay(log: Tensor) -> Tensor:
        return torch.exp(log.to(dtype))[:, None, :] if name == "gk" else torch.exp(log.to(dtype))[:, None, None]

    for b, position in enumerate(views["ring_position"].tolist()):
        slot = int(views["state_indices"][b])
        if not 0 <= slot < state.shape[0] or slot == pad_slot_id or not 0 <= position < length:
            if zero_padding:
                out[b] = 0
            continue
        S = state[slot].to(dtype)
        for i in range(position):
            S = decay(ring_g[slot, i]) * S + ring_v[slot, i].to(dtype)[:, :, None] * of_heads(ring_k[slot, i])[:, None, :]
        q, k, v = (views[n][b, 0].to(dtype) for n in ("q", "k", "v"))
        q, k = (normalised(q), normalised(k)) if form.l2norm else (q, k)
        log = _ready(name, views[name][b, 0].to(dtype), form, weights, lower_bound)
        S = decay(log) * S
        error = v - torch.einsum("hvk,hk->hv", S, of_heads(k))
        if "beta" in views:
            error = error * step_size(views["beta"][b, 0].to(dtype), form)[:, None]
        S = S + error[:, :, None] * of_heads(k)[:, None, :]
        out[b, 0] = torch.einsum("hvk,hk->hv", S, of_heads(q)) * scale
        if position == length - 1 or ("ring_flush" in views and int(views["ring_flush"][b])):
            state[slot] = S.to(state.dtype)
        else:
            ring_k[slot, position], ring_v[slot, position], ring_g[slot, position] = k, error, log


def reference(
    views: Mapping[str, Tensor],
    form: Any,
    *,
    scale: float,
    lower_bound: float = 0.0,
    pad_slot_id: int = -1,
    update_state: bool = True,
    zero_padding: bool = True,
    philox_rounds: int = 0,
    keys_first: bool = False,
    ring_ready: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Operands in token form: state [slots, HV, V, K]; q, k, read, write, alpha [B, T, HK, K]; gk, erase [B, T, HV, K]; v, gv, w, out
    [B, T, HV, V]; g [B, T, HV]; beta [B, T, HV] or [B, T, HV, V]; A_log [HV]; dt_bias [HV] or [HV, K]; intermediate_states
    [rows, T, HV, V, K]; parents [batch, T]; rand_seed [slots]; ring_k and others [slots, T, …], which receive k and others. With
    cu_seqlens, B is 1 and T counts the tokens of all sequences. keys_first: as in `stepped`. ring_ready: rings receive log decays and step
    sizes. With ring_position: as in `replay`.

    Computes in `dtype`, and rounds as in `stepped`.
    """
    if "ring_position" in views:
        replay(views, form, scale, lower_bound, pad_slot_id, zero_padding, dtype)
        return
    weights = {n: views[n].to(dtype) for n in WEIGHTS if n in views}
    tokenwise, heads = [n for n in ROLES if n in views and n not in WEIGHTS], views["out"].shape[2]

    def token(S: Tensor, row: int, t: int, slot: int, i: int) -> tuple[Tensor, Tensor]:
        x = {n: views[n][row, t].to(dtype) for n in tokenwise}
        x |= {n: x[n].repeat_interleave(heads // x[n].shape[0], 0) for n in OF_KEY_HEADS if n in x}
        for n in RINGED:
            if f"ring_{n}" in views and i < views[f"ring_{n}"].shape[1]:
                gate = ring_ready and n not in ("k", "v")
                views[f"ring_{n}"][slot, i] = _ready(n, x[n], form, weights, lower_bound) if gate else views[n][row, t]
        return one_token(S, x | weights, form, scale, lower_bound)

    how: dict[str, Any] = {"update_state": update_state, "zero_padding": zero_padding, "keys_first": keys_first, "dtype": dtype}
    stepped(views, token, pad_slot_id=pad_slot_id, philox_rounds=philox_rounds, **how)
