"""Decode steps of delta rules, and commits of the inputs in their ring. `call.py` documents the rules of all functions."""

from __future__ import annotations

from torch import Tensor

from ...calls.operator import operator
from ...engine.recurrences.attention.switches import Form, beta_objections, beta_of, gate_objections, gate_of
from .options import PoolOptions, Ring, commit, decode


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
    ring_ready: bool = False,
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
        rand_seed, philox_rounds, ring_ready,
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
    ring_ready: bool = False,
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
        rand_seed, philox_rounds, ring_ready,
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
