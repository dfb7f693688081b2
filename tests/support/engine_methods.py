"""The parameters of vLLM's layers' methods, and functions, that serve all steps of a kind: a part of engine_signatures."""

from __future__ import annotations

_GDN = "vllm.model_executor.layers.mamba.gdn"

METHODS = {
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
