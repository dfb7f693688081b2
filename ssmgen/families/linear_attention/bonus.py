"""Decode steps that read the state before they add to it, with a bonus for the token. `call.py` documents the rules of all functions."""

from __future__ import annotations

from torch import Tensor

from ...calls.operator import operator
from ...engine.recurrences.attention.switches import Form
from .options import PoolOptions, decode

_BONUS = Form("none")


@operator(like="v")
def rwkv6(
    state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, u: Tensor, *,
    scale: float | None = 1.0, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """RWKV-6 (Finch): out = (S + v (u k)^T) r, then S <- S D + v k^T, with D = diag(e^w). The output reads S before the token.

    r, k: […, HK, K]         v: […, HV, V]         w: […, HV, K], log decay
    u: [HV, K] or […, HV, K], the bonus of the token itself

    The scale is 1 unless given. Otherwise as gated_delta_rule. Source: Peng et al. 2024 (arXiv 2404.05892).
    """
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, state_scale=state_scale, zero_padding=zero_padding, rand_seed=rand_seed,
        philox_rounds=philox_rounds,
    )  # fmt: skip
    return decode("rwkv6", _BONUS, pool, state, r, k, v, None, w, bonus=u)
