"""The parameters of the engines' layers' methods, and functions, that serve all steps of a kind: a part of engine_signatures."""

from __future__ import annotations

_GDN = "vllm.model_executor.layers.mamba.gdn"

METHODS = {
    ("vllm.models.qwen4_exp.common.ops.ple", "ple_conv"): (
        "inputs, residual, conv_state, conv_weights, state_indices, outer_residual, *, mode, dilation, query_start_loc=None, "
        "num_accepted_tokens=None, has_initial_states=None, spec_query_len=1, token_indices=None"
    ),
    ("sglang.kernels.ops.mamba.qwen4_short_conv", "fused_qwen4_verify_conv"): (
        "x, residual, weight, state, state_indices, valid, width, dilation, intermediate"
    ),
    ("sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm", "fused_recurrent_linear_replayssm_decode"): (
        "mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, d_cache, k_cache, g_cache, out, ssm_state_indices, write_pos, "
        "force_flush=None, use_qk_l2norm_in_kernel=False, is_kda=False, block_v=None, num_warps=1, num_stages=3, nk=2"
    ),
    ("sglang.srt.models.qwen4_exp", "Qwen4ExpPLELayer._short_conv"): "self, x, forward_batch, batch",
    ("sglang.srt.layers.logits_processor", "LogitsProcessor._compute_lm_head"): (
        "self, hidden_states, lm_head, embedding_bias=None, *, out=None"
    ),
    (f"{_GDN}.olmo_gdn_linear_attn", "OlmoHybridGatedDeltaNetAttention._forward_core"): "self, mixed_qkv, b, a, core_attn_out",
    (f"{_GDN}.kimi_gdn_linear_attn", "KimiGatedDeltaNetAttention._forward"): "self, mixed_qkv, g1, g2, beta, core_attn_out",
    ("vllm.models.kimi_k3.nvidia.kda", "KimiK3DeltaAttention._forward"): "self, mixed_qkv, g1, g2, beta, core_attn_out",
    ("vllm.model_executor.models.bailing_moe_v3", "BailingMoeV3KimiDeltaAttention._forward"): (
        "self, q_proj_states, k_proj_states, v_proj_states, g1, beta, core_attn_out"
    ),
    ("vllm.models.glm5next.common.kda", "Glm5NextLinearAttention._forward"): "self, qkv_proj_states, g1, beta, core_attn_out",
    ("vllm.model_executor.layers.mamba.linear.bailing_linear_attn", "clear_linear_attention_cache_for_new_sequences"): (
        "kv_cache, state_indices_tensor, attn_metadata"
    ),
    ("vllm.model_executor.layers.mamba.linear.bailing_linear_attn", "linear_attention_prefill_and_mix"): (
        "q, k, v, kv_cache, state_indices_tensor, attn_metadata, slope_rate, block_size, decode_fn, prefix_fn, layer_idx=None"
    ),
}
