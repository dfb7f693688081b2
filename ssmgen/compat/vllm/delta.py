"""vLLM's functions for prompts of gated delta rules and of Kimi delta attention, as in vLLM 0.33: its layers call the first
kind with either backend, the second kind with the Triton backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import ArgumentError
from ...families.chunk_linear_attention.call import chunk_kda as _chunk_kda
from ..shared import delta_prompts as _prompts
from ..shared.gated_delta import new_output as _new_output
from ..shared.operands import takes as _takes
from ..shared.replacing import Replacement


@_takes("output_final_state", **_prompts.PACKED, initial_state="[N, HV, V, K]")
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(output [B, T, HV, V] of q's dtype, f32 states after each sequence [N, HV, V, K], None unless output_final_state).

    q, k: [B, T, H, K]   v: [B, T, HV, V]   g: [B, T, HV], the log decay   beta: [B, T, HV]   initial_state: [N, HV, V, K]
    cu_seqlens: [N + 1], packed sequences, with B = 1; else N is B
    core_attn_out: a dense buffer, whose first elements are the output; None for a new one
    chunk_indices and chunk_offsets follow from cu_seqlens: ignored
    """
    out = _output(q, v, core_attn_out)
    final = _prompts.states_of(q, v, _prompts.sequences_of(v, cu_seqlens)) if output_final_state else None
    _prompts.run(
        _prompts.chunk_gated_delta_rule, (q, k, v, g, beta), out, initial_states=initial_state, last=final, cu_seqlens=cu_seqlens,
        scale=scale, use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, final


def _output(q: Tensor, v: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is None:
        return _new_output(q, v)
    if buffer.numel() < v.numel() or not buffer.is_contiguous():
        found = f"{list(buffer.shape)} with strides {list(buffer.stride())}"
        problem = f"core_attn_out is {found}; expected a dense tensor with at least the elements of the output {list(v.shape)}"
        raise ArgumentError("vllm's chunk_gated_delta_rule", [problem])
    return buffer.view(-1)[: v.numel()].view(v.shape)


@_takes("output_final_state", **_prompts.PACKED, initial_state="[N, HV, V, K]", state_checkpoints="[count, HV, V, K]")
def fi_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """chunk_gated_delta_rule of packed sequences, as vLLM calls FlashInfer: also the states after every n tokens, n a multiple of 64.

    checkpoint_cu_starts: [N + 1], the first row of state_checkpoints [count, HV, V, K] of each sequence   use_cp: ignored
    """
    positions = _prompts.places(
        "vllm's fi_chunk_gated_delta_rule", v, checkpoint_every_n_tokens, cu_seqlens, state_checkpoints, checkpoint_cu_starts, []
    )
    out = _new_output(q, v)
    final = _prompts.states_of(q, v, _prompts.sequences_of(v, cu_seqlens)) if output_final_state else None
    _prompts.run(
        _prompts.chunk_gated_delta_rule, (q, k, v, g, beta), out, initial_states=initial_state, last=final, cu_seqlens=cu_seqlens,
        positions=positions, checkpoints=state_checkpoints, use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, final


_KDA = {n: shape for n, shape in _prompts.PACKED.items() if n != "g"} | {"initial_state": "[N, HV, V, K]"}


@_takes("output_final_state", **_KDA, g="[B, T, HV, K]")
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(output [B, T, HV, V] of q's dtype, f32 states after each sequence [N, HV, V, K], None unless output_final_state).

    q, k: [B, T, H, K]   v: [B, T, HV, V]   g: [B, T, HV, K], the log decay   beta: [B, T, HV]   initial_state: [N, HV, V, K]
    cu_seqlens: [N + 1], packed sequences, with B = 1; else N is B   Other keywords are ignored, as there.
    """
    return _kda((q, k, v, g, beta), scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


@_takes("output_final_state", **(_KDA | {"out": "[B, T, HV, V]", "raw_beta": "[B, T, HV]", "raw_g": "[B, T, HV, K]"}))
def chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """chunk_kda of a raw gate and a logit of beta, as vLLM's Kimi layers call it.

    raw_g: [B, T, HV, K]   raw_beta: [B, T, HV]   A_log: HV elements   g_bias: HV K elements, None for none
    lower_bound: the log decay is lower_bound sigmoid(e^A_log (raw_g + g_bias)); None for -e^A_log softplus(raw_g + g_bias)
    out: [B, T, HV, V], receives the output; None for a new one
    """
    return _kda(
        (q, k, v, raw_g, raw_beta, A_log.reshape(-1), None if g_bias is None else g_bias.reshape(-1)), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, out, lower_bound=lower_bound, beta_sigmoid=True,
    )  # fmt: skip


@_takes("output_final_state safe_gate", **(_KDA | {"raw_g": "[B, T, HV, K]"}))
def chunk_kda_with_safe_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = -5.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """chunk_kda of a raw gate, as vLLM's GLM layers call their chunk_kda_with_fused_gate: lower_bound counts with safe_gate only, and beta
    [B, T, HV] is no logit. Otherwise as chunk_kda_with_fused_gate."""
    return _kda(
        (q, k, v, raw_g, beta, A_log.reshape(-1), None if g_bias is None else g_bias.reshape(-1)), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, lower_bound=lower_bound if safe_gate else None,
    )  # fmt: skip


def _kda(
    operands: tuple[Tensor | None, ...], scale: float | None, initial_state: Tensor | None, output_final_state: bool, l2norm: bool,
    cu_seqlens: Tensor | None, out: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    q, _, v, *_ = operands
    assert q is not None and v is not None  # looked at before
    out = _new_output(q, v) if out is None else out
    final = _prompts.states_of(q, v, _prompts.sequences_of(v, cu_seqlens)) if output_final_state else None
    _prompts.run(
        _chunk_kda, operands, out, initial_states=initial_state, last=final, cu_seqlens=cu_seqlens, scale=scale, use_qk_l2norm=l2norm,
        **options,
    )  # fmt: skip
    return out, final


_FLA, _MODELS, _LAYERS = "vllm.third_party.flash_linear_attention.ops", "vllm.models", "vllm.model_executor.layers"
REPLACEMENTS = [
    Replacement(f"{_FLA}.chunk", "chunk_gated_delta_rule", chunk_gated_delta_rule),
    Replacement(f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn", "fi_chunk_gated_delta_rule", fi_chunk_gated_delta_rule),
    Replacement(f"{_FLA}.kda", "chunk_kda", chunk_kda),
    Replacement(f"{_MODELS}.kimi_k3.nvidia.ops.third_party.kda.chunk", "chunk_kda_with_fused_gate", chunk_kda_with_fused_gate),
    Replacement(f"{_MODELS}.glm5next.nvidia.ops.third_party.kda.kernels", "chunk_kda_with_fused_gate", chunk_kda_with_safe_gate),
]
