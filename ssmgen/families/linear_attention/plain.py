"""Decode steps of linear attention that adds to the state and subtracts nothing. `call.py` documents the rules of all functions."""

from __future__ import annotations

from torch import Tensor

from ...calls.operator import operator
from ...engine.recurrences.attention.switches import Form
from .options import PoolOptions, decode

_PLAIN, _SLOPE = Form("none"), Form("none", "slope")


@operator(like="v")
def gla(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, *,
    scale: float | None = None, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """Gated linear attention: S <- diag(e^gv) S diag(e^gk) + v k^T;  out = scale S q.

    gk: […, HV, K], log decay of each key channel         gv: […, HV, V], log decay of each value channel; either may be None

    Otherwise as gated_delta_rule. Source: Yang et al. 2023 (arXiv 2312.06635).
    """
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, state_scale=state_scale, zero_padding=zero_padding, rand_seed=rand_seed,
        philox_rounds=philox_rounds,
    )  # fmt: skip
    return decode("gla", _PLAIN, pool, state, q, k, v, None, gk, gv)


@operator(like="v")
def simple_gla(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *,
    scale: float | None = None, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """Linear attention with a decay per head: S <- e^g S + v k^T;  out = scale S q.

    g: […, HV] or [HV], log decay of each token or of all; None for none

    Otherwise as gated_delta_rule. Source: Yang et al. 2023 (arXiv 2312.06635), with a gate per head.
    """
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, state_scale=state_scale, zero_padding=zero_padding, rand_seed=rand_seed,
        philox_rounds=philox_rounds,
    )  # fmt: skip
    return decode("simple_gla", _PLAIN, pool, state, q, k, v, g)


@operator(like="v")
def lightning_attn(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, slope: Tensor, *,
    scale: float | None = None, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, out: Tensor | None = None, pdl: bool | None = None,
    intermediate_state_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Lightning attention (MiniMax): S <- e^-slope S + v k^T;  out = scale S q.

    slope: [HV], at least 0: no token changes it

    Otherwise as gated_delta_rule; some models want scale=1. Source: Qin et al. 2024 (arXiv 2401.04658).
    """
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, state_scale=state_scale, zero_padding=zero_padding, rand_seed=rand_seed,
        philox_rounds=philox_rounds, intermediate_state_indices=intermediate_state_indices,
    )  # fmt: skip
    return decode("lightning_attn", _SLOPE, pool, state, q, k, v, slope)
