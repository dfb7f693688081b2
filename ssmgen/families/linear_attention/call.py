"""Decode steps of linear attention with a recurrent state: gated delta rules, KDA, GLA, RWKV-7 and others, on torch tensors.

They take the state as a pool and share the keywords of `PoolOptions`. Notation: a call has `batch` sequences; HK key heads (of q, k) and
HV heads of v and the state, a multiple of HK; K key channels and V value channels per head. An operand written `[…, HV]` is
`[batch, HV]` for one token per sequence, `[batch, T, HV]` for T, or `[tokens, HV]` (also `[1, tokens, HV]`) for sequences of different
lengths, packed, with cu_seqlens. Floating tensors may be f32, f16 or bf16, each with its own dtype, and strided views; arithmetic is f32.

Per token: S <- the recurrence of the function, in which S is [HV, V, K]; out = scale S q, from the new state before it is rounded. Within
a call the state stays in f32; it is rounded when it is stored.

Every function returns out (new, of v's shape and dtype, if not given). CPU tensors run the reference implementation. All raise
ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a kernel would have to be
built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
"""

from __future__ import annotations

from torch import Tensor

from ...calls.operator import operator
from ...engine.recurrences.attention.switches import Form, beta_objections, beta_of, gate_objections, gate_of
from .options import PoolOptions, Ring, commit, decode

__all__ = [
    "PoolOptions", "Ring", "comba", "delta_rule", "dplr_delta_rule", "gated_delta_rule", "gated_delta_rule_commit", "gdn2", "gla", "kda",
    "kda_commit", "lightning_attn", "rwkv6", "rwkv7", "simple_gla",
]  # fmt: skip


@operator(like="v")
def gated_delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    *,
    use_qk_l2norm: bool = False, beta_sigmoid: bool = False, allow_neg_eigval: bool = False,
    scale: float | None = None, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, ring: Ring | None = None, out: Tensor | None = None,
    pdl: bool | None = None, parents: Tensor | None = None, intermediate_state_indices: Tensor | None = None,
    ring_ready: bool = False, ring_position: Tensor | None = None, ring_flush: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid): S <- a S + beta (v - a S k) k^T, with a = e^g;  out = scale S q.

    A call makes one decode step, or several. HV heads of V value and K key channels; HK heads of q and k, each for HV / HK heads of v.
    […] is [batch] for one token per sequence, [batch, T] for several, or [tokens] (also [1, tokens]) for packed sequences with cu_seqlens.

    state: [slots, HV, V, K], updated in place         q, k: […, HK, K]         v, out: […, HV, V]
    g: […, HV], log decay         beta: […, HV], or […, HV, V] for one per value channel
        All are f32, f16 or bf16, each with its own dtype. Arithmetic is f32, and the output uses the new state before rounding
    use_qk_l2norm: q and k are first divided by sqrt(|x|^2 + 1e-6)
    scale: factor of the output; None for K^-0.5
    state_indices: [batch] int32 or int64, slot of each sequence; None for slot = sequence

    Raw gates:
    A_log, dt_bias: [HV]: g is then the raw gate, whose log decay is -e^A_log softplus(g + dt_bias); dt_bias may be None
    beta_sigmoid: beta is a logit; allow_neg_eigval: uses twice its sigmoid

    Everything else: see PoolOptions. Returns out. Raises the same errors as selective_state_update.
    Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    form = Form("decayed", gate_of(A_log, None), beta_of(beta_sigmoid, allow_neg_eigval), use_qk_l2norm)
    objections = gate_objections(A_log, dt_bias) + beta_objections(beta_sigmoid, allow_neg_eigval)
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, ring, state_scale, parents, intermediate_state_indices, zero_padding,
        rand_seed, philox_rounds, ring_ready, ring_position, ring_flush,
    )  # fmt: skip
    return decode("gated_delta_rule", form, pool, state, q, k, v, g, None, None, beta, A_log, dt_bias, objections=objections)


@operator(like="v")
def kda(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None, use_qk_l2norm: bool = False, beta_sigmoid: bool = False, allow_neg_eigval: bool = False,
    scale: float | None = None, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, ring: Ring | None = None, out: Tensor | None = None,
    pdl: bool | None = None, parents: Tensor | None = None, intermediate_state_indices: Tensor | None = None,
    ring_ready: bool = False, ring_position: Tensor | None = None, ring_flush: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Kimi delta attention (Kimi-Linear): S <- S D + beta (v - S D k) k^T, with D = diag(e^g);  out = scale S q.

    g: […, HV, K], log decay of each key channel; with A_log [HV] the raw gate, whose log decay is -e^A_log softplus(g + dt_bias), or with
        lower_bound lower_bound sigmoid(e^A_log (g + dt_bias)), where A_log may be missing; dt_bias [HV, K], [HV K] or None

    Otherwise as gated_delta_rule. Source: Kimi Team 2025 (arXiv 2510.26692).
    """
    form = Form("decayed", gate_of(A_log, lower_bound), beta_of(beta_sigmoid, allow_neg_eigval), use_qk_l2norm)
    objections = gate_objections(A_log, dt_bias, lower_bound) + beta_objections(beta_sigmoid, allow_neg_eigval)
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, ring, state_scale, parents, intermediate_state_indices, zero_padding,
        rand_seed, philox_rounds, ring_ready, ring_position, ring_flush,
    )  # fmt: skip
    return decode(
        "kda", form, pool, state, q, k, v, None, g, None, beta, A_log, dt_bias, lower_bound=lower_bound, objections=objections
    )  # fmt: skip


@operator(like="v")
def gdn2(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, *,
    lower_bound: float | None = None, use_qk_l2norm: bool = False,
    scale: float | None = None, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """Gated DeltaNet 2: S <- S D + (w v - S D (b k)) k^T, with D = diag(e^g);  out = scale S q.

    b: […, HV, K], the erase gate of each key channel         w: […, HV, V], the write gate of each value channel
    g, A_log, dt_bias, lower_bound: as in kda

    Both gates are applied as they are. Otherwise as gated_delta_rule. Source: flash-linear-attention, fla.ops.gdn2.
    """
    form = Form("decayed", gate_of(A_log, lower_bound), "plain", use_qk_l2norm)
    objections = gate_objections(A_log, dt_bias, lower_bound)
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, state_scale=state_scale, zero_padding=zero_padding, rand_seed=rand_seed,
        philox_rounds=philox_rounds,
    )  # fmt: skip
    return decode(
        "gdn2", form, pool, state, q, k, v, None, g, None, None, A_log, dt_bias, None, b, w, lower_bound=lower_bound, objections=objections
    )  # fmt: skip


@operator(like="v")
def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *,
    use_qk_l2norm: bool = False, beta_sigmoid: bool = False, allow_neg_eigval: bool = False,
    scale: float | None = None, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, ring: Ring | None = None, out: Tensor | None = None,
    pdl: bool | None = None, parents: Tensor | None = None, intermediate_state_indices: Tensor | None = None,
    ring_ready: bool = False,
) -> Tensor:  # fmt: skip
    """DeltaNet: S <- S + beta (v - S k) k^T;  out = scale S q.

    state: [slots, HV, V, K], updated in place         q, k: […, HK, K]         v, out: […, HV, V]         beta: […, HV] or […, HV, V]

    Otherwise as gated_delta_rule. Source: Yang et al. 2024 (arXiv 2406.06484).
    """
    form = Form("decayed", "log", beta_of(beta_sigmoid, allow_neg_eigval), use_qk_l2norm)
    objections = beta_objections(beta_sigmoid, allow_neg_eigval)
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, ring, state_scale, parents, intermediate_state_indices, zero_padding,
        rand_seed, philox_rounds, ring_ready,
    )  # fmt: skip
    return decode("delta_rule", form, pool, state, q, k, v, None, None, None, beta, objections=objections)


@operator(like="v")
def comba(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, *,
    use_qk_l2norm: bool = False, beta_sigmoid: bool = False,
    scale: float | None = None, state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, pad_slot_id: int = -1, zero_padding: bool = True, cu_seqlens: Tensor | None = None,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    intermediate_states: Tensor | None = None, update_state: bool = True, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """Comba: S <- a S + beta (v - S p) k^T, with a = e^g;  out = scale S q. It reads the state before its decay.

    p: […, HK, K], the key that reads the state; use_qk_l2norm normalises it too

    Otherwise as gated_delta_rule. Source: Hu et al. 2025 (arXiv 2506.02475), as fla's fused kernel does.
    """
    form = Form("old", gate_of(A_log, None), beta_of(beta_sigmoid, False), use_qk_l2norm)
    objections = gate_objections(A_log, dt_bias)
    pool = PoolOptions(
        scale, state_layout, state_indices, dst_state_indices, num_accepted_tokens, pad_slot_id, cu_seqlens, intermediate_states,
        update_state, out, pdl, state_scale=state_scale, zero_padding=zero_padding, rand_seed=rand_seed,
        philox_rounds=philox_rounds,
    )  # fmt: skip
    return decode("comba", form, pool, state, q, k, v, g, None, None, beta, A_log, dt_bias, p, objections=objections)


@operator(like="num_accepted_tokens")
def gated_delta_rule_commit(
    state: Tensor, ring: Ring, num_accepted_tokens: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    use_qk_l2norm: bool = False, beta_sigmoid: bool = False, allow_neg_eigval: bool = False, state_layout: str = "vk",
    state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None, pad_slot_id: int = -1, pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """Replays the accepted tokens of a speculative step on the state, from a ring of inputs: S <- a S + beta (v - a S k) k^T for each.

    state: [slots, HV, V, K], updated in place and returned; [layers, slots, …] with ring, A_log and dt_bias likewise, in one launch
    ring: the ring that gated_delta_rule(…, update_state=False, ring=ring) has filled: k, v, g and beta, [slots, T or more, …] each
    num_accepted_tokens: [batch] int32 or int64: how many of the sequence's tokens to replay; 0, or a number out of range, changes nothing
    dst_state_indices: [batch], the slot that receives the state, which no other sequence may read; None for in place

    Other arguments as in gated_delta_rule and PoolOptions. The state equals gated_delta_rule's on these tokens, bit for bit.
    Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    form = Form("decayed", gate_of(A_log, None), beta_of(beta_sigmoid, allow_neg_eigval), use_qk_l2norm)
    objections = gate_objections(A_log, dt_bias) + beta_objections(beta_sigmoid, allow_neg_eigval)
    return commit(
        "gated_delta_rule_commit", form, state, ring, num_accepted_tokens, A_log, dt_bias, per_channel=False,
        state_layout=state_layout, state_indices=state_indices, dst_state_indices=dst_state_indices, pad_slot_id=pad_slot_id, pdl=pdl,
        objections=objections,
    )  # fmt: skip


@operator(like="num_accepted_tokens")
def kda_commit(
    state: Tensor, ring: Ring, num_accepted_tokens: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    lower_bound: float | None = None, use_qk_l2norm: bool = False, beta_sigmoid: bool = False, allow_neg_eigval: bool = False,
    state_layout: str = "vk", state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None, pad_slot_id: int = -1,
    pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """The same as gated_delta_rule_commit, for kda: S <- S D + beta (v - S D k) k^T, with D = diag(e^g).

    ring: as there, with g [slots, T or more, HV, K]

    Source: Kimi Team 2025 (arXiv 2510.26692).
    """
    form = Form("decayed", gate_of(A_log, lower_bound), beta_of(beta_sigmoid, allow_neg_eigval), use_qk_l2norm)
    objections = gate_objections(A_log, dt_bias, lower_bound) + beta_objections(beta_sigmoid, allow_neg_eigval)
    return commit(
        "kda_commit", form, state, ring, num_accepted_tokens, A_log, dt_bias, per_channel=True, lower_bound=lower_bound,
        state_layout=state_layout, state_indices=state_indices, dst_state_indices=dst_state_indices, pad_slot_id=pad_slot_id, pdl=pdl,
        objections=objections,
    )  # fmt: skip


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
