"""vLLM's functions for decode steps of Kimi delta attention, for drafts of gated delta rules with the norm after them, and for drafts of
Bailing's Lightning attention, as in vLLM 0.33."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...calls.operator import call_of
from ...errors import ArgumentError
from ...families.gated_rms_norm.call import gated_rms_norm
from ...families.linear_attention.call import gated_delta_rule as _gated_delta_rule
from ...families.linear_attention.call import kda as _kda
from ...families.linear_attention.call import lightning_attn as _lightning_attn
from ..shared import gated_delta, noise
from ..shared.gated_delta import first as _first
from ..shared.gated_delta import shaped as _shaped
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement

_STEP = gated_delta.LOGITS | gated_delta.POOL


@_takes("inplace_final_state", **_STEP, g="[B, T, HV, K]")
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Steps of Kimi delta attention on a pool, per token: S <- S D + beta (v - S D k) k^T, with D = diag(e^g);  o = scale S q.

    q, k: [B, T, HK, K]          v: [B, T, HV, V]          g: [B, T, HV, K], log decay of each key channel          beta: [B, T, HV]
    initial_state: [slots, HV, V, K], updated in place          cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    ssm_state_indices: [N], or [N, T]: each token's state goes to its own column, and the first is read
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5

    Returns (a new output of q's dtype, initial_state). Slots of 0 and below, and out of the pool, are padding: a zero output, and no state
    is touched. Other keywords are ignored, as in vLLM, whose Bailing layers call it.
    Raises UnsupportedError without a pool and indices, or with inplace_final_state=False; and ArgumentError (a ValueError).
    """
    where = (initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, None)
    return _step("vllm's fused_recurrent_kda", (q, k, v, g, beta), where, None, use_qk_l2norm=use_qk_l2norm_in_kernel, scale=scale)


@_takes("inplace_final_state", **_STEP, g="[B, T, HV, K]")
def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Steps of Kimi delta attention on a pool, drafts too: S <- S D + beta (v - S D k) k^T, with D = diag(e^g);  o = scale S q.

    q, k: [B, T, HK, K]          v: [B, T, HV, V]          g: [B, T, HV, K], log decay of each key channel          beta: [B, T, HV]
    initial_state: [slots, HV, V, K], updated in place          cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    ssm_state_indices: [N], or [N, T]: each token's state goes to its own column, and the first is read
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)
    num_accepted_tokens: [N]: the column that is read is this less one, instead of the first

    Returns (a new output of q's dtype, initial_state). Slots of 0 and below, and out of the pool, are padding: a zero output, and no state
    is touched.
    Raises UnsupportedError without a pool and indices, or with inplace_final_state=False; and ArgumentError (a ValueError).
    """
    where = (initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens)
    return _step("vllm's fused_recurrent_kda_fwd", (q, k, v, g, beta), where, None, use_qk_l2norm=use_qk_l2norm_in_kernel, scale=scale)


@_takes("", **_STEP, raw_g="[B, T, HV, K]", out="[B, T, HV, V]")
def fused_recurrent_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Steps of Kimi delta attention with a raw gate and a logit of beta: S <- S D + beta (v - S D k) k^T;  o = K^-0.5 S q.

    D = diag(e^g), with g = -e^A_log softplus(raw_g + dt_bias), or lower_bound sigmoid(e^A_log (raw_g + dt_bias)); beta = sigmoid(raw_beta).

    q, k: [B, T, HK, K], which are divided by sqrt(|x|^2 + 1e-6)          v: [B, T, HV, V]
    raw_g: [B, T, HV, K]          raw_beta: [B, T, HV]          A_log: HV elements          dt_bias: HV K elements; None for none
    lower_bound: a number for the second form of the gate; None for the first
    initial_state: [slots, HV, V, K], updated in place          cu_seqlens: [N + 1], packed sequences, B = 1
    ssm_state_indices: [N], or [N, T]: each token's state goes to its own column, and the first is read
    num_accepted_tokens: [N]: the column that is read is this less one, instead of the first
    out: receives the output; None for a new one of q's dtype

    Returns (output, initial_state). Slots of 0 and below, and out of the pool, are padding: a zero output, and no state is touched.
    Raises UnsupportedError without a pool and indices, and ArgumentError (a ValueError). vLLM's Kimi layers call it.

    Ignored arguments:
    fuse_gate: chooses among vLLM's kernels
    """
    where = (initial_state, True, cu_seqlens, ssm_state_indices, num_accepted_tokens)
    return _step(
        "vllm's fused_recurrent_kda", (q, k, v, raw_g, raw_beta, *_gate(A_log, dt_bias)), where, out, lower_bound=lower_bound,
        use_qk_l2norm=True, beta_sigmoid=True,
    )  # fmt: skip


@_takes("inplace_final_state compute_gate", **_STEP, g="[B, T, HV, K]", out="[B, T, HV, V]")
def fused_recurrent_kda_with_safe_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Steps of Kimi delta attention on a pool, as vLLM's GLM layers call them: S <- S D + beta (v - S D k) k^T;  o = scale S q.

    D = diag(e^g), or with compute_gate diag(e^(lower_bound sigmoid(e^a_log (g + g_bias)))).

    q, k: [B, T, HK, K]          v: [B, T, HV, V]          g: [B, T, HV, K], log decay, or with compute_gate the raw gate
    beta: [B, T, HV], with sigmoid_beta a logit          a_log: HV elements          g_bias: HV K elements
    initial_state: [slots, HV, V, K], updated in place          cu_seqlens: [N + 1], packed sequences, B = 1; else N is B
    ssm_state_indices: [N], or [N, T]: each token's state goes to its own column, and the first is read
    num_accepted_tokens: [N]: the column that is read is this less one, instead of the first
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    out: receives the output; None for a new one of q's dtype

    Returns (output, initial_state). Slots of 0 and below, and out of the pool, are padding: a zero output, and no state is touched. Other
    keywords are ignored, as in vLLM.
    Raises UnsupportedError without a pool and indices, or with inplace_final_state=False. Raises ArgumentError (a ValueError) if a_log,
    g_bias or lower_bound is None with compute_gate, and for operands that do not fit.
    """
    name = "vllm's fused_recurrent_kda"
    operands: tuple[Tensor | None, ...] = (q, k, v, g, beta)
    if compute_gate:
        needed = {"a_log": a_log, "g_bias": g_bias, "lower_bound": lower_bound}
        if missing := [f"{what} is None with compute_gate=True; expected a tensor" for what, given in needed.items() if given is None]:
            raise ArgumentError(name, missing)
        operands += _gate(a_log, g_bias)
    where = (initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens)
    return _step(
        name, operands, where, out, lower_bound=lower_bound if compute_gate else None, use_qk_l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=sigmoid_beta, scale=scale,
    )  # fmt: skip


def _gate(A_log: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """One row each."""
    A_log, bias = (t if t is None or t.dim() == 1 else t.reshape(-1) for t in (A_log, bias))
    return A_log, bias


def _step(
    name: str, operands: tuple[Tensor | None, ...], where: tuple[Tensor | None, bool, Tensor | None, Tensor | None, Tensor | None],
    out: Tensor | None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Steps in a pool. where: the pool, whether in place, where sequences begin, their slots, and how many tokens were accepted."""
    q, _, v, *_ = operands
    assert q is not None and v is not None  # looked at before
    options |= gated_delta.on_a_pool(name, v, *where)
    out = gated_delta.new_output(q, v) if out is None else out
    given: Any = (where[0], *operands)
    options |= noise.of(given[0])
    _kda(*given, out=out, **options)
    return out, given[0]


@_takes(mixed_qkv="[B, channels]", raw_g="[1, B, HV, K]", raw_beta="[1, B, HV]", state_indices="[B]", out="[1, B, HV, V]")
def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per sequence of Kimi delta attention, with q, k and v packed: S <- S D + beta (v - S D k) k^T;  o = scale S q.

    D = diag(e^g), with g = -e^A_log softplus(raw_g + dt_bias), or lower_bound sigmoid(e^A_log (raw_g + dt_bias)); beta = sigmoid(raw_beta).

    mixed_qkv: [B, 2 HK K + HV V], q, k and v consecutive; q and k are divided by sqrt(|x|^2 + 1e-6)
    raw_g: [1, B, HV, K]          raw_beta: [1, B, HV]          A_log: HV elements          dt_bias: HV K elements
    lower_bound: a number for the second form of the gate; None for the first          scale: None for K^-0.5
    initial_state: [slots, HV, V, K], updated in place          state_indices: [B]
    out: [1, B, HV, V], receives the output; None for a new one of mixed_qkv's dtype

    Returns (output, initial_state). Slots of 0 and below, and out of the pool, are padding: a zero output, and no state is touched.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    q, k, v = gated_delta.unpacked("fused_recurrent_kda_packed_decode", mixed_qkv, initial_state)
    B, HV, V = v.shape
    out = mixed_qkv.new_empty((1, B, HV, V)) if out is None else out
    _kda(
        initial_state, q, k, v, raw_g[0], raw_beta[0], *_gate(A_log, dt_bias), lower_bound=lower_bound, use_qk_l2norm=True,
        beta_sigmoid=True, scale=scale, state_indices=_first(state_indices, B), pad_slot_id=0, out=out[0], **noise.of(initial_state),
    )  # fmt: skip
    return out, initial_state


@_takes(
    mixed_qkv="[tokens, channels]", state_indices="[N, T]", cu_seqlens="[N + 1]", num_accepted_tokens="[N]",
    **dict.fromkeys(("output_gate", "out"), "[tokens, HV, V]"),
)  # fmt: skip
def fused_gdn_decode_post_conv_mtp(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor,
    state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    out: Tensor | None = None,
    scale: float = 128**-0.5,
    norm_eps: float = 1e-5,
    output_gate_activation: str = "silu",
) -> Tensor:
    """Drafts of Gated DeltaNet, and the gated norm after them: out = norm(scale S q) norm_weight act(output_gate), in two launches.

    mixed_qkv: [tokens, 2 HK K + HV V], q, k and v consecutive; q and k are divided by sqrt(|x|^2 + 1e-6)
    a, b: [tokens, HV], raw gate and logit of beta          A_log, dt_bias: [HV]          state: [slots, HV, V, K], updated in place
    state_indices: [N, T]: each token's state goes to its own column
    num_accepted_tokens: [N]: the column that is read is this less one
    cu_seqlens: [N + 1], start of each packed sequence          output_gate: [tokens, HV, V]          norm_weight: [V]
    norm_eps: of the RMS norm          output_gate_activation: "silu", "swish" or "sigmoid"
    out: [tokens, HV, V], is written; None for a new one like output_gate

    Returns out. Slots of 0 and below, and out of the pool, are padding, and touch no state. As in vLLM, the norm reads the delta rule's
    output rounded to out's dtype.
    Raises ArgumentError (a ValueError) for operands that do not fit, before the states change.
    """
    name = "vllm's fused_gdn_decode_post_conv_mtp"
    q, k, v = (t[None] for t in gated_delta.unpacked(name, mixed_qkv, state))
    out = output_gate.new_empty(output_gate.shape) if out is None else out
    options = gated_delta.on_a_pool(name, v, state, True, cu_seqlens, state_indices, num_accepted_tokens)
    # The norm refuses here, before the states have changed.
    norm = call_of(
        gated_rms_norm, out, output_gate, norm_weight, norm_eps, norm_before_gate=True, activation=output_gate_activation, out=out
    ).plan()
    _gated_delta_rule(
        state, q, k, v, a[None], b[None], A_log, dt_bias, use_qk_l2norm=True, beta_sigmoid=True, scale=scale,
        out=_shaped(out, tuple(v.shape)), **noise.of(state), **options,
    )  # fmt: skip
    norm()
    return out


@_takes(
    **dict.fromkeys(("q", "k", "v"), "[tokens, H, K]"), kv_cache="[slots, H, K, V]", state_indices_tensor="[N, T]",
    query_start_loc="[N + 1]", num_accepted_tokens="[N]",
)  # fmt: skip
def bailing_linear_attention_decode_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    slope_rate: Tensor,
    state_indices_tensor: Tensor,
    query_start_loc: Tensor,
    num_accepted_tokens: Tensor,
    q_start: int,
    q_end: int | None,
    slot_start: int,
    slot_end: int | None,
    block_size: int,
) -> Tensor:
    """Drafts of Bailing's Lightning attention, per token: S <- e^-slope S + v k^T;  o = S q, in one launch instead of one per token.

    q, k, v: [tokens, H, K], of which tokens q_start to q_end count          slope_rate: H elements, at least 0
    kv_cache: [slots, H, K, V], a pool, updated in place          query_start_loc: [N + 1], start of each packed sequence
    state_indices_tensor: [N, T], whose rows from slot_start to slot_end count: each token's state goes to its own column
    num_accepted_tokens: [N]: the column that is read is this less one; 0 is like 1
    block_size: ignored

    Returns a new output [tokens, H V] of q's dtype. Negative slots and slots out of the pool are padding: a zero output, and no state is
    touched. Unlike in vLLM, the states of a call stay f32 between its tokens.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    table = state_indices_tensor[slot_start:slot_end]
    q, k, v = (t[q_start:q_end] for t in (q, k, v))
    starts = query_start_loc[: table.shape[0] + 1]
    out = torch.zeros(v.shape, dtype=q.dtype, device=v.device)
    _lightning_attn(
        kv_cache, q, k, v, slope_rate.reshape(-1), scale=1.0, state_layout="kv", state_indices=table, dst_state_indices=table,
        num_accepted_tokens=num_accepted_tokens[: table.shape[0]].clamp(1, max(table.shape[1], 1)),
        cu_seqlens=starts - q_start if q_start else starts, out=out,
    )  # fmt: skip
    return out.flatten(1)


_FLA, _MODELS = "vllm.third_party.flash_linear_attention.ops", "vllm.models"
_KIMI, _GLM = f"{_MODELS}.kimi_k3.nvidia.ops.third_party.kda", f"{_MODELS}.glm5next.nvidia.ops.third_party.kda"
REPLACEMENTS = [
    Replacement(f"{_FLA}.kda", "fused_recurrent_kda", fused_recurrent_kda),
    Replacement(f"{_FLA}.kda", "fused_recurrent_kda_fwd", fused_recurrent_kda_fwd),
    Replacement(f"{_KIMI}.fused_recurrent", "fused_recurrent_kda", fused_recurrent_kda_with_fused_gate),
    Replacement(f"{_KIMI}.fused_recurrent", "fused_recurrent_kda_packed_decode", fused_recurrent_kda_packed_decode),
    Replacement(f"{_GLM}.kernels", "fused_recurrent_kda", fused_recurrent_kda_with_safe_gate),
    Replacement(
        "vllm.model_executor.layers.mamba.linear.bailing_linear_attn", "bailing_linear_attention_decode_spec",
        bailing_linear_attention_decode_spec,
    ),
    Replacement("vllm._custom_ops", "fused_gdn_decode_post_conv_mtp", fused_gdn_decode_post_conv_mtp),
]  # fmt: skip
