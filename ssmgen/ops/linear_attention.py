"""Decode steps of linear attention with a recurrent state: gated delta rules, KDA, GLA, RWKV-7 and others, on torch tensors.

All of them take the state as a pool and share what `PoolOptions` says. Notation: a call has `batch` sequences; HK key heads (of q, k) and
HV heads of v and the state, a multiple of HK; K key channels and V value channels per head. An operand written `[…, HV]` is
`[batch, HV]` for one token per sequence, `[batch, T, HV]` for T, or `[tokens, HV]` (also `[1, tokens, HV]`) for sequences of different
lengths, packed, with cu_seqlens. Floating tensors may be f32, f16 or bf16, each its own, and strided views; arithmetic is f32.

Per token: S <- the recurrence of the function, in which S is [HV, V, K]; out = scale S q, from the new state before it is rounded. Within
a call the state stays in f32; it is rounded where it is stored.

Every function returns out (new, of v's shape and dtype, if not given). CPU tensors run the reference implementation. All raise
ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a kernel would have to be
built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from .calls import Call, operator
from .linear_attention_call import CALLERS
from .linear_attention_views import Form, Options, ring_objections
from .linear_attention_views import RawInputs as Ring


class PoolOptions(TypedDict, total=False):
    """Keywords of every function here.

    scale: factor of the output; None for K^-0.5
    state_layout: "vk" for a state [slots, HV, V, K], "kv" for [slots, HV, K, V]; never inferred. Its last three axes are dense
    state_indices: [batch] int32 or int64, slot of each sequence; None for slot = sequence. With num_accepted_tokens: [batch, columns]
    dst_state_indices: [batch], where the state goes after the last token, None for in place; or [batch, T], a slot for the state after
        each token. A slot that is not valid is not written. Slots must be distinct, else sequences race
    num_accepted_tokens: [batch] int32 or int64, from 1: the sequence starts from the slot in that column of state_indices
    pad_slot_id: a sequence whose slot is negative, equals it or is no slot of the pool, or whose count of accepted tokens is out of range,
        gets a zero output and touches no state
    cu_seqlens: [batch + 1] int32 or int64, where each sequence's tokens start; ends with their number. A sequence may have none
    intermediate_states: [batch, T or more, HV, V, K] (or K, V) of the state's dtype: receives the state after each token
    update_state: False leaves the pool as it is
    ring: of gated_delta_rule, delta_rule and kda: receives the tokens' raw k, v, g and beta in the sequence's slot
    out: of v's shape; None for a new one
    pdl: whether the kernel may start while the one ahead of it in the stream ends (it waits before it reads anything); None = where the
        device can (sm_90 and later)
    """

    scale: float | None
    state_layout: str
    state_indices: Tensor | None
    dst_state_indices: Tensor | None
    num_accepted_tokens: Tensor | None
    pad_slot_id: int
    cu_seqlens: Tensor | None
    intermediate_states: Tensor | None
    update_state: bool
    ring: Ring | None
    out: Tensor | None
    pdl: bool | None


_CONTIGUOUS = torch.contiguous_format


def _call(
    name: str, form: Form, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None,
    gv: Tensor | None = None, beta: Tensor | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    read: Tensor | None = None, erase: Tensor | None = None, w: Tensor | None = None, write: Tensor | None = None,
    alpha: Tensor | None = None, lower_bound: float | None = None, *, scale: float | None = None, state_layout: str = "vk",
    state_indices: Tensor | None = None, dst_state_indices: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    pad_slot_id: int = -1, cu_seqlens: Tensor | None = None, intermediate_states: Tensor | None = None, update_state: bool = True,
    ring: Ring | None = None, out: Tensor | None = None, pdl: bool | None = None, objections: tuple[str, ...] = (),
) -> Call:  # fmt: skip
    if out is None:
        out = torch.empty_like(v, memory_format=_CONTIGUOUS) if isinstance(v, Tensor) else v  # the checks object to v
    if scale is None:
        scale = q.shape[-1] ** -0.5 if isinstance(q, Tensor) and q.dim() and q.shape[-1] else 1.0
    given = (
        state, q, k, v, g, gk, gv, beta, A_log, dt_bias, read, erase, w, write, alpha, out,
        state_indices, dst_state_indices, num_accepted_tokens, cu_seqlens, intermediate_states, *_by_operand(ring, gk is not None),
    )  # fmt: skip
    how = Options(form, scale, lower_bound or 0.0, state_layout, pad_slot_id, update_state)
    return Call(CALLERS[name], given, how, pdl, objections=objections + ring_objections(ring))


def _by_operand(ring: Ring | None, per_channel: bool) -> tuple[Tensor | None, ...]:
    if ring is None or ring_objections(ring):
        return _NO_RING
    k, v, g, beta = ring
    return (k, v, None, g, beta) if per_channel else (k, v, g, None, beta)


_NO_RING = (None,) * 5


def _gate_objections(g: str, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None) -> tuple[str, ...]:
    if dt_bias is None or A_log is not None or lower_bound is not None:
        return ()
    return (f"dt_bias is given without A_log: it belongs to a raw gate, and {g} is a log decay",)


def _beta_objections(beta_sigmoid: bool, allow_neg_eigval: bool) -> tuple[str, ...]:
    return ("allow_neg_eigval doubles the sigmoid of beta: give beta_sigmoid too",) if allow_neg_eigval and not beta_sigmoid else ()


def _gate(A_log: Tensor | None, lower_bound: float | None) -> str:
    return "bounded" if lower_bound is not None else "log" if A_log is None else "softplus"


def _beta(beta_sigmoid: bool, allow_neg_eigval: bool) -> str:
    return "plain" if not beta_sigmoid else "twice_sigmoid" if allow_neg_eigval else "sigmoid"


@operator(like="v")
def gated_delta_rule(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    use_qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    **options: Unpack[PoolOptions],
) -> Tensor:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo-Hybrid): S <- a S + beta (v - a S k) k^T, with a = e^g.

    state: [slots, HV, V, K], updated in place         q, k: […, HK, K]; v: […, HV, V]
    g: […, HV], log decay; with A_log [HV] the raw gate, of which the log decay is -e^A_log softplus(g + dt_bias), dt_bias [HV] or None
    beta: […, HV], or […, HV, V] for one per value channel; beta_sigmoid: it is a logit; allow_neg_eigval: twice its sigmoid
    use_qk_l2norm: q and k are divided by sqrt(|x|^2 + 1e-6) first
    options: see PoolOptions
    Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    form = Form("decayed", _gate(A_log, None), _beta(beta_sigmoid, allow_neg_eigval), use_qk_l2norm)
    objections = _gate_objections("g", A_log, dt_bias) + _beta_objections(beta_sigmoid, allow_neg_eigval)
    return _call(
        "gated_delta_rule", form, state, q, k, v, g, None, None, beta, A_log, dt_bias, objections=objections,
        **options,
    )  # fmt: skip


@operator(like="v")
def kda(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    **options: Unpack[PoolOptions],
) -> Tensor:
    """Kimi delta attention (Kimi-Linear): gated delta rule with a decay per key channel: S <- S D + beta (v - S D k) k^T, D = diag(e^g).

    g: […, HV, K], log decay; with A_log [HV] the raw gate, of which the log decay is -e^A_log softplus(g + dt_bias), or with lower_bound
        lower_bound sigmoid(e^A_log (g + dt_bias)), in which A_log may be missing; dt_bias [HV, K], [HV K] or None
    Otherwise as gated_delta_rule. Source: Kimi Team 2025 (arXiv 2510.26692).
    """
    form = Form("decayed", _gate(A_log, lower_bound), _beta(beta_sigmoid, allow_neg_eigval), use_qk_l2norm)
    objections = _gate_objections("g", A_log, dt_bias, lower_bound) + _beta_objections(beta_sigmoid, allow_neg_eigval)
    return _call(
        "kda", form, state, q, k, v, None, g, None, beta, A_log, dt_bias, lower_bound=lower_bound,
        objections=objections, **options,
    )  # fmt: skip


@operator(like="v")
def gdn2(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    use_qk_l2norm: bool = False,
    **options: Unpack[PoolOptions],
) -> Tensor:
    """Gated DeltaNet 2: S <- S D + (w v - S D (b k)) k^T, with an erase gate per key channel and a write gate per value channel.

    g, A_log, dt_bias, lower_bound: as in kda           b: […, HV, K]; w: […, HV, V], both applied as they are
    Otherwise as gated_delta_rule. Source: flash-linear-attention, fla.ops.gdn2.
    """
    form = Form("decayed", _gate(A_log, lower_bound), "plain", use_qk_l2norm)
    return _call(
        "gdn2", form, state, q, k, v, None, g, None, None, A_log, dt_bias, None, b, w, lower_bound=lower_bound,
        objections=_gate_objections("g", A_log, dt_bias, lower_bound), **options,
    )  # fmt: skip


@operator(like="v")
def delta_rule(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    **options: Unpack[PoolOptions],
) -> Tensor:
    """DeltaNet: S <- S + beta (v - S k) k^T. Operands as in gated_delta_rule. Source: Yang et al. 2024 (arXiv 2406.06484)."""
    form = Form("decayed", "log", _beta(beta_sigmoid, allow_neg_eigval), use_qk_l2norm)
    objections = _beta_objections(beta_sigmoid, allow_neg_eigval)
    return _call("delta_rule", form, state, q, k, v, None, None, None, beta, objections=objections, **options)


@operator(like="v")
def comba(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    use_qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    **options: Unpack[PoolOptions],
) -> Tensor:
    """Comba: S <- a S + beta (v - S p) k^T, a = e^g: it reads the state before its decay, with a key p […, HK, K] of its own.

    use_qk_l2norm normalises p too. Otherwise as gated_delta_rule. Source: Hu et al. 2025 (arXiv 2506.02475), as fla's fused kernel does.
    """
    form = Form("old", _gate(A_log, None), _beta(beta_sigmoid, False), use_qk_l2norm)
    objections = _gate_objections("g", A_log, dt_bias)
    return _call(
        "comba", form, state, q, k, v, g, None, None, beta, A_log, dt_bias, p, objections=objections, **options
    )  # fmt: skip


@operator(like="v")
def rwkv7(
    state: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, **options: Unpack[PoolOptions]
) -> Tensor:  # fmt: skip
    """RWKV-7: S <- S D - (S kk) (kk a)^T + v k^T, D = diag(e^w); out = S r, with scale 1 unless given.

    r, w, k, kk, a: […, H, K]; w: log decay; v: […, H, V]. Otherwise as gated_delta_rule. Source: Peng et al. 2025 (arXiv 2503.14456).
    """
    options.setdefault("scale", 1.0)
    return _call("rwkv7", _LOW_RANK, state, r, k, v, None, w, read=kk, alpha=a, **options)


@operator(like="v")
def dplr_delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor | None = None, **options: Unpack[PoolOptions]
) -> Tensor:
    """Diagonal plus low rank: S <- S D + (S a) b^T + v k^T, D = diag(e^gk) or none.

    q, k, a, b: […, HK, K]; gk: […, HV, K], log decay; v: […, HV, V]. Otherwise as gated_delta_rule.
    Source: flash-linear-attention, fla.ops.generalized_delta_rule.
    """
    return _call("dplr_delta_rule", _LOW_RANK, state, q, k, v, None, gk, read=a, write=b, **options)


@operator(like="v")
def gla(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, **options: Unpack[PoolOptions]
) -> Tensor:
    """Gated linear attention: S <- S D + v k^T, with a log decay gk […, HV, K] per key channel, gv […, HV, V] per value channel, or both.

    Otherwise as gated_delta_rule. Source: Yang et al. 2023 (arXiv 2312.06635).
    """
    return _call("gla", _PLAIN, state, q, k, v, None, gk, gv, **options)


@operator(like="v")
def simple_gla(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, **options: Unpack[PoolOptions]) -> Tensor:
    """Linear attention with a log decay g […, HV] or [HV] per head, or none: S <- e^g S + v k^T.

    Otherwise as gated_delta_rule.
    """
    return _call("simple_gla", _PLAIN, state, q, k, v, g, **options)


@operator(like="v")
def lightning_attn(state: Tensor, q: Tensor, k: Tensor, v: Tensor, slope: Tensor, **options: Unpack[PoolOptions]) -> Tensor:
    """Lightning attention (MiniMax): S <- e^-slope S + v k^T, with a slope [HV] per head that no token changes.

    Otherwise as gated_delta_rule; some models want scale=1. Source: Qin et al. 2024 (arXiv 2401.04658).
    """
    return _call("lightning_attn", _SLOPE, state, q, k, v, slope, **options)


def _commit(
    name: str, form: Form, state: Tensor, ring: Ring, num_accepted_tokens: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    lower_bound: float | None, per_channel: bool, objections: tuple[str, ...], *, state_layout: str = "vk",
    state_indices: Tensor | None = None, pad_slot_id: int = -1, pdl: bool | None = None,
) -> Call:  # fmt: skip
    k, v, g, gk, beta = _by_operand(ring, per_channel)
    none = (None,) * 5
    given = (
        state, None, k, v, g, gk, None, beta, A_log, dt_bias, *none, None, state_indices, None, num_accepted_tokens, None, None, *none
    )  # fmt: skip
    how = Options(form, 1.0, lower_bound or 0.0, state_layout, pad_slot_id, True, commit=True)
    return Call(CALLERS[name], given, how, pdl, ("state",), objections + ring_objections(ring))


@operator(like="num_accepted_tokens")
def gated_delta_rule_commit(
    state: Tensor, ring: Ring, num_accepted_tokens: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    use_qk_l2norm: bool = False, beta_sigmoid: bool = False, allow_neg_eigval: bool = False, state_layout: str = "vk",
    state_indices: Tensor | None = None, pad_slot_id: int = -1, pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """Takes the accepted tokens of a speculative step over into the state, from the ring that the step has filled.

    state: [slots, HV, V, K], updated in place and returned; [layers, slots, …] with ring, A_log and dt_bias likewise, in one launch
    ring: what gated_delta_rule(…, update_state=False, ring=ring) was given
    num_accepted_tokens: [batch] int32 or int64: how many of the sequence's tokens to replay; 0, or a number out of range, changes nothing
    Other arguments as in gated_delta_rule and PoolOptions; the result is that of gated_delta_rule on those tokens, bit for bit.
    """
    form = Form("decayed", _gate(A_log, None), _beta(beta_sigmoid, allow_neg_eigval), use_qk_l2norm)
    objections = _gate_objections("g", A_log, dt_bias) + _beta_objections(beta_sigmoid, allow_neg_eigval)
    return _commit(
        "gated_delta_rule_commit", form, state, ring, num_accepted_tokens, A_log, dt_bias, None, False, objections,
        state_layout=state_layout, state_indices=state_indices, pad_slot_id=pad_slot_id, pdl=pdl,
    )  # fmt: skip


@operator(like="num_accepted_tokens")
def kda_commit(
    state: Tensor, ring: Ring, num_accepted_tokens: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    lower_bound: float | None = None, use_qk_l2norm: bool = False, beta_sigmoid: bool = False, allow_neg_eigval: bool = False,
    state_layout: str = "vk", state_indices: Tensor | None = None, pad_slot_id: int = -1, pdl: bool | None = None,
) -> Tensor:  # fmt: skip
    """As gated_delta_rule_commit, for kda: ring.g is [slots, T, HV, K]."""
    form = Form("decayed", _gate(A_log, lower_bound), _beta(beta_sigmoid, allow_neg_eigval), use_qk_l2norm)
    objections = _gate_objections("g", A_log, dt_bias, lower_bound) + _beta_objections(beta_sigmoid, allow_neg_eigval)
    return _commit(
        "kda_commit", form, state, ring, num_accepted_tokens, A_log, dt_bias, lower_bound, True, objections,
        state_layout=state_layout, state_indices=state_indices, pad_slot_id=pad_slot_id, pdl=pdl,
    )  # fmt: skip


_PLAIN, _SLOPE, _LOW_RANK = Form("none"), Form("none", "slope"), Form("old")

FUNCTIONS: tuple[Any, ...] = (
    gated_delta_rule, kda, gdn2, delta_rule, comba, rwkv7, dplr_delta_rule, gla, simple_gla, lightning_attn,
    gated_delta_rule_commit, kda_commit,
)  # fmt: skip
