"""vLLM's functions for prompts of gated delta rules and of Kimi delta attention, as in vLLM 0.33: of both backends for the former, and of
the Triton backend for the latter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import ArgumentError
from ...families.chunk_linear_attention.call import chunk_kda as _chunk_kda
from ..shared import delta_prompts as _prompts
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
    """Gated DeltaNet over prompts, per token: S <- a S + beta (v - a S k) k^T, with a = e^g;  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V]; bf16 or f16, one dtype; K and V are multiples of 16 up to 256
    g: [B, T, HV], log decay, at most 0          beta: [B, T, HV]; f32, bf16 or f16 each
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    cu_seqlens: [N + 1], start of each packed sequence, with B = 1; else N is B
    initial_state: [N, HV, V, K] f32, f16 or bf16; None for zeros
    core_attn_out: a dense buffer, whose first elements receive the output; None for a new one

    Returns (output [B, T, HV, V] of q's dtype, f32 states after each sequence [N, HV, V, K], or None without output_final_state).
    Unlike in vLLM, states between chunks are f32, and normalised q and k are not rounded.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.

    Ignored arguments:
    chunk_indices, chunk_offsets: they follow from cu_seqlens
    """
    return _prompts.returned(
        _prompts.chunk_gated_delta_rule, (q, k, v, g, beta), output_final_state, initial_states=initial_state, cu_seqlens=cu_seqlens,
        scale=scale, use_qk_l2norm=use_qk_l2norm_in_kernel, out=None if core_attn_out is None else _output(v, core_attn_out),
    )  # fmt: skip


def _output(v: Tensor, buffer: Tensor) -> Tensor:
    """The beginning of a buffer, in v's shape."""
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
    """Gated DeltaNet over packed prompts, as vLLM calls FlashInfer: S <- a S + beta (v - a S k) k^T, with a = e^g;  o = K^-0.5 S q.

    q, k: [1, T, H, K]          v: [1, T, HV, V]; bf16 or f16, one dtype; K and V are multiples of 16 up to 256
    g: [1, T, HV], log decay, at most 0          beta: [1, T, HV]; f32, bf16 or f16 each
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)
    initial_state: [N, HV, V, K] f32, f16 or bf16          cu_seqlens: [N + 1], start of each packed sequence

    Returns (output [1, T, HV, V] of q's dtype, f32 states after each sequence [N, HV, V, K], or None without output_final_state).
    Unlike in vLLM, normalised q and k are not rounded.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.

    States at positions, for prefix caches:
    checkpoint_every_n_tokens: n, a multiple of 64; 0 for none: the state after every n tokens of sequence i goes to state_checkpoints
        [count, HV, V, K], from row checkpoint_cu_starts[i] on, [N + 1]

    Ignored arguments:
    use_cp: divides FlashInfer's work
    """
    positions = _prompts.places(
        "vllm's fi_chunk_gated_delta_rule", v, checkpoint_every_n_tokens, cu_seqlens, state_checkpoints, checkpoint_cu_starts, []
    )
    return _prompts.returned(
        _prompts.chunk_gated_delta_rule, (q, k, v, g, beta), output_final_state, initial_states=initial_state, cu_seqlens=cu_seqlens,
        positions=positions, checkpoints=state_checkpoints, use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip


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
    """Kimi delta attention over prompts, per token: S <- S D + beta (v - S D k) k^T, with D = diag(e^g);  o = scale S q.

    q, k: [B, T, H, K]          v: [B, T, HV, V]; bf16 or f16, one dtype; K and V are multiples of 16 up to 256
    g: [B, T, HV, K], log decay of each key channel, at most 0          beta: [B, T, HV]; f32, bf16 or f16 each
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    cu_seqlens: [N + 1], start of each packed sequence, with B = 1; else N is B
    initial_state: [N, HV, V, K] f32, f16 or bf16; None for zeros

    Returns (output [B, T, HV, V] of q's dtype, f32 states after each sequence [N, HV, V, K], or None without output_final_state).
    Unlike in vLLM, states between chunks are f32, and normalised q and k are not rounded. Other keywords are ignored, as in vLLM.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    return _prompts.returned(
        _chunk_kda, (q, k, v, g, beta), output_final_state, initial_states=initial_state, cu_seqlens=cu_seqlens, scale=scale,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip


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
    """Kimi delta attention over prompts, with a raw gate and a logit of beta: S <- S D + beta (v - S D k) k^T;  o = scale S q.

    D = diag(e^g), with g = -e^A_log softplus(raw_g + g_bias), or lower_bound sigmoid(e^A_log (raw_g + g_bias)); beta = sigmoid(raw_beta).

    q, k: [B, T, H, K]          v: [B, T, HV, V]; bf16 or f16, one dtype; K and V are multiples of 16 up to 256
    raw_g: [B, T, HV, K]          raw_beta: [B, T, HV]          A_log: HV elements          g_bias: HV K elements; None for none
    lower_bound: a number for the second form of the gate; None for the first
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    cu_seqlens: [N + 1], start of each packed sequence, with B = 1; else N is B
    initial_state: [N, HV, V, K] f32, f16 or bf16; None for zeros
    out: [B, T, HV, V], receives the output; None for a new one of q's dtype

    Returns (output, f32 states after each sequence [N, HV, V, K], or None without output_final_state). vLLM's Kimi layers call it.
    Unlike in vLLM, states between chunks are f32, and normalised q and k are not rounded. Other keywords are ignored, as in vLLM.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    return _prompts.returned(
        _chunk_kda, (q, k, v, raw_g, raw_beta, A_log.reshape(-1), None if g_bias is None else g_bias.reshape(-1)), output_final_state,
        initial_states=initial_state, cu_seqlens=cu_seqlens, out=out, scale=scale, use_qk_l2norm=use_qk_l2norm_in_kernel,
        lower_bound=lower_bound, beta_sigmoid=True,
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
    """Kimi delta attention over prompts, with a raw gate: S <- S D + beta (v - S D k) k^T;  o = scale S q. vLLM's GLM layers call it.

    D = diag(e^g), with g = -e^A_log softplus(raw_g + g_bias), or with safe_gate lower_bound sigmoid(e^A_log (raw_g + g_bias)).

    q, k: [B, T, H, K]          v: [B, T, HV, V]; bf16 or f16, one dtype; K and V are multiples of 16 up to 256
    raw_g: [B, T, HV, K]          beta: [B, T, HV], not a logit          A_log: HV elements          g_bias: HV K elements or None
    lower_bound: only counts with safe_gate
    use_qk_l2norm_in_kernel: q and k are first divided by sqrt(|x|^2 + 1e-6)          scale: None for K^-0.5
    cu_seqlens: [N + 1], start of each packed sequence, with B = 1; else N is B
    initial_state: [N, HV, V, K] f32, f16 or bf16; None for zeros

    Returns (output [B, T, HV, V] of q's dtype, f32 states after each sequence [N, HV, V, K], or None without output_final_state).
    Unlike in vLLM, states between chunks are f32, and normalised q and k are not rounded. Other keywords are ignored, as in vLLM.
    Raises ArgumentError (a ValueError) listing every violated requirement, before anything is launched.
    """
    return _prompts.returned(
        _chunk_kda, (q, k, v, raw_g, beta, A_log.reshape(-1), None if g_bias is None else g_bias.reshape(-1)), output_final_state,
        initial_states=initial_state, cu_seqlens=cu_seqlens, scale=scale, use_qk_l2norm=use_qk_l2norm_in_kernel,
        lower_bound=lower_bound if safe_gate else None,
    )  # fmt: skip


_FLA, _MODELS, _LAYERS = "vllm.third_party.flash_linear_attention.ops", "vllm.models", "vllm.model_executor.layers"
REPLACEMENTS = [
    Replacement(f"{_FLA}.chunk", "chunk_gated_delta_rule", chunk_gated_delta_rule),
    Replacement(f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn", "fi_chunk_gated_delta_rule", fi_chunk_gated_delta_rule),
    Replacement(f"{_FLA}.kda", "chunk_kda", chunk_kda),
    Replacement(f"{_MODELS}.kimi_k3.nvidia.ops.third_party.kda.chunk", "chunk_kda_with_fused_gate", chunk_kda_with_fused_gate),
    Replacement(f"{_MODELS}.glm5next.nvidia.ops.third_party.kda.kernels", "chunk_kda_with_fused_gate", chunk_kda_with_safe_gate),
]
