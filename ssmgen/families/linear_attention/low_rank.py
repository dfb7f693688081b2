"""Decode steps that subtract a low-rank product of the state before its decay. `call.py` documents the rules of all functions."""

from __future__ import annotations

from torch import Tensor

from ...calls.operator import operator
from ...engine.recurrences.attention.switches import Form
from .options import PoolOptions, decode

_LOW_RANK = Form("old")


@operator(like="v")
def rwkv7(
    state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, *,
    scale: float | None = 1.0, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """RWKV-7: S <- S D - (S kk) (kk a)^T + v k^T, with D = diag(e^w);  out = S r, with scale 1 unless given.

    r, w, k, kk, a: […, H, K]; w: log decay         v: […, H, V]

    Otherwise as gated_delta_rule. Source: Peng et al. 2025 (arXiv 2503.14456).
    """
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, state_scale=state_scale, zero_padding=zero_padding, rand_seed=rand_seed,
        philox_rounds=philox_rounds,
    )  # fmt: skip
    return decode("rwkv7", _LOW_RANK, pool, state, r, k, v, None, w, read=kk, alpha=a)


@operator(like="v")
def dplr_delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor | None = None, *,
    scale: float | None = None, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """Diagonal plus low rank: S <- S D + (S a) b^T + v k^T, with D = diag(e^gk);  out = scale S q.

    q, k, a, b: […, HK, K]         v: […, HV, V]         gk: […, HV, K], log decay; None for D = 1

    Otherwise as gated_delta_rule. Source: flash-linear-attention, fla.ops.generalized_delta_rule.
    """
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, state_scale=state_scale, zero_padding=zero_padding, rand_seed=rand_seed,
        philox_rounds=philox_rounds,
    )  # fmt: skip
    return decode("dplr_delta_rule", _LOW_RANK, pool, state, q, k, v, None, gk, read=a, write=b)
