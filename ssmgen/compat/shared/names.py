"""The names of all replaced functions and methods, of vLLM and of SGLang. replacing.py checks SSMGEN_ENGINE_KEEP against them."""

from __future__ import annotations

# The names that SSMGEN_ENGINE_KEEP accepts, for all engines.
NAMES = (
    "_flashkda_prefill", "bailing_linear_attention_decode_spec", "causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule",
    "chunk_kda", "chunk_kda_with_fused_gate", "clear_linear_attention_cache_for_new_sequences", "commit_kda_replayssm_spec_all_layers",
    "fi_chunk_gated_delta_rule", "flashinfer_gdn_prefill_default", "fused_gdn_decode_post_conv_mtp", "fused_kda_decode",
    "fused_lfm_short_conv_decode", "fused_lfm_short_conv_prefill", "fused_qkv_split_gdn_prefill", "fused_qwen4_verify_conv",
    "fused_recurrent_gated_delta_rule", "fused_recurrent_gated_delta_rule_packed_decode", "fused_recurrent_gated_delta_rule_update",
    "fused_recurrent_kda", "fused_recurrent_kda_fwd", "fused_recurrent_kda_packed_decode", "fused_recurrent_linear_replayssm_decode",
    "fused_sigmoid_gating_delta_rule_update", "kda_fused_decode", "kda_prefill_checkpoint_alignment", "layer_norm_fwd",
    "lightning_attention", "linear_attention_prefill_and_mix", "linear_decode_forward_triton", "mamba_chunk_scan_combined",
    "mamba_chunk_scan_combined_varlen", "merge_attn_states", "merge_state", "merge_state_v2", "ple_conv", "rms_norm_gated",
    "seg_la_fwd", "selective_scan_fn", "selective_state_update", "selective_state_update_replayssm_flashinfer",
    "selective_state_update_replayssm_output_only", "BailingMoeV3KimiDeltaAttention._forward", "FusedRMSNormGated.forward_native",
    "Glm5NextLinearAttention._flashkda_prefill", "Glm5NextLinearAttention._forward", "KimiGatedDeltaNetAttention._forward",
    "KimiK3DeltaAttention._forward", "Lfm2MoeShortConv.forward", "Lfm2ShortConv.forward", "LogitsProcessor._compute_lm_head",
    "MambaMixer1._forward_prefill", "MambaMixer1._selective_scan", "Mixer2RMSNormGated.forward_native",
    "OlmoHybridGatedDeltaNetAttention._forward_core", "Qwen3GatedDeltaNet.forward", "Qwen3_5GatedDeltaNet.forward",
    "Qwen4ExpPLELayer._short_conv", "QwenGatedDeltaNetAttention._forward_core",
    "QwenGatedDeltaNetAttention._forward_core_decode_non_spec", "RMSNormGated.forward_native", "ShortConv.forward_cuda",
    "TritonGDNKernel.extend", "UnquantizedEmbeddingMethod.apply", "UnquantizedLinearMethod.apply",
)  # fmt: skip
