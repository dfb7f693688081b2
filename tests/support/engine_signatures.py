"""The engines' functions that the plugins replace, as published, and who imports them there.

SIGNATURES: {(module, name): parameters}, of vLLM 0.33.0 (source distribution) and SGLang 0.5.23 (wheel), without annotations. null_block_id
and pad_slot_id have a module's constant for a default there, NULL_BLOCK_ID = 0 and PAD_SLOT_ID = -1.
IMPORTS: {module: import statements}: the statements of the same releases that bind one of these functions by name.
"""

from __future__ import annotations

from engine_methods import METHODS
from engine_wrapped import BACKENDS as BACKENDS
from engine_wrapped import WRAPPED

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}

_OPS, _GDN = "vllm.model_executor.layers.mamba.ops", "vllm.model_executor.layers.mamba.gdn"
_FLA = "vllm.third_party.flash_linear_attention.ops"
_MAMBA, _ATTENTION, _LAYERS = "sglang.kernels.ops.mamba", "sglang.kernels.ops.attention", "sglang.srt.layers.attention"
_RING = f"{_ATTENTION}.linear.fused_recurrent_linear_replayssm"
_KIMI, _GLM = "vllm.models.kimi_k3.nvidia.ops.third_party.kda", "vllm.models.glm5next.nvidia.ops.third_party.kda"
_LIGHTNING = "q, k, v, ed, block_size=256, kv_history=None"
_LIGHTNING_STEP = "q, k, v, kv_caches, slope_rate, slot_idx, BLOCK_SIZE=32"
_APPLY = "self, layer, x, bias=None"
_NORM = "x, g, weight, bias, activation='swish', residual=None, prenorm=False, residual_in_fp32=False, eps=1e-06"
_PACKED = "mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel=False"

_DECODE = "QwenGatedDeltaNetAttention._forward_core_decode_non_spec"
_FORWARD = {"lfm2": "Lfm2ShortConv", "lfm2_moe": "Lfm2MoeShortConv", "qwen3_5": "Qwen3_5GatedDeltaNet", "qwen3_next": "Qwen3GatedDeltaNet"}

SIGNATURES = {
    (f"{_OPS}.mamba_ssm", "selective_state_update"): (
        "state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None, dst_state_batch_indices=None, "
        "null_block_id=0, out=None, num_accepted_tokens=None, cu_seqlens=None, is_blackwell=False, enable_stochastic_rounding=False, "
        "cache_philox_rounds=0"
    ),
    (f"{_OPS}.ssu_dispatch", "selective_state_update_replayssm_flashinfer"): (
        "state, x, dt, A, B, C, out, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, prev_query_len, logical_window, "
        "D=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, null_block_id=0, scratch=None, update_trackers=True, "
        "enable_stochastic_rounding=False, stochastic_rounding_philox_rounds=0, cu_seqlens=None, max_seqlen=None, enable_pdl=False"
    ),
    (f"{_OPS}.selective_state_update_replayssm_output_only", "selective_state_update_replayssm_output_only"): (
        "state, x, dt, A, B, C, D=None, dt_bias=None, z=None, dt_softplus=False, x_cache=None, dt_cache=None, B_cache=None, bc_pre=None, "
        "write_pos=None, is_flush=None, max_cache_len=16, state_batch_indices=None, null_block_id=0, out=None, "
        "enable_stochastic_rounding=False, cache_philox_rounds=0"
    ),
    (f"{_OPS}.mamba_ssm", "selective_scan_fn"): (
        "u, ssm_states, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, query_start_loc=None, cache_indices=None, "
        "has_initial_state=None, null_block_id=0, block_size=1024, block_idx_first_scheduled_token=None, "
        "block_idx_last_scheduled_token=None, initial_state_idx=None, cu_chunk_seqlen=None, last_chunk_indices=None"
    ),
    (f"{_OPS}.ssd_combined", "mamba_chunk_scan_combined_varlen"): (
        "x, dt, A, B, C, chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx, out, D=None, z=None, dt_bias=None, "
        "initial_states=None, dt_softplus=False, dt_limit=(0.0, float('inf')), return_intermediate_states=False, state_dtype=None, "
        "final_states_out=None, final_state_indices=None"
    ),
    (f"{_OPS}.causal_conv1d", "causal_conv1d_fn"): (
        "x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, activation='silu', pad_slot_id=-1, "
        "null_block_id=0, metadata=None, validate_data=False"
    ),
    (f"{_OPS}.causal_conv1d", "causal_conv1d_update"): (
        "x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None, query_start_loc=None, "
        "max_query_len=-1, null_block_id=0, validate_data=False, out=None"
    ),
    (f"{_FLA}.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"): _PACKED,
    (f"{_FLA}.fused_recurrent", "fused_recurrent_gated_delta_rule"): (
        "q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, cu_seqlens=None, ssm_state_indices=None, "
        "num_accepted_tokens=None, use_qk_l2norm_in_kernel=False"
    ),
    (f"{_FLA}.fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update"): (
        "A_log, a, b, dt_bias, q, k, v, beta=1.0, threshold=20.0, scale=None, initial_state=None, inplace_final_state=True, "
        "cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False, is_kda=False"
    ),
    (f"{_FLA}.chunk", "chunk_gated_delta_rule"): (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_indices=None, "
        "chunk_offsets=None, use_qk_l2norm_in_kernel=False, core_attn_out=None"
    ),
    (f"{_GDN}.qwen_gdn_linear_attn", "fi_chunk_gated_delta_rule"): (
        "q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, use_qk_l2norm_in_kernel=True, state_checkpoints=None, "
        "checkpoint_cu_starts=None, checkpoint_every_n_tokens=0, use_cp='auto'"
    ),
    (f"{_GDN}.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention._forward_core"): "self, mixed_qkv, b, a, core_attn_out",
    (f"{_GDN}.qwen_gdn_linear_attn", _DECODE): "self, mixed_qkv, b, a, core_attn_out, attn_metadata",
    (f"{_FLA}.kda", "chunk_kda"): (
        "q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, "
        "**kwargs"
    ),
    (f"{_KIMI}.chunk", "chunk_kda_with_fused_gate"): (
        "q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False, lower_bound=None, "
        "use_qk_l2norm_in_kernel=False, cu_seqlens=None, out=None, **kwargs"
    ),
    (f"{_GLM}.kernels", "chunk_kda_with_fused_gate"): (
        "q, k, v, raw_g, beta, A_log, g_bias, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "cu_seqlens=None, safe_gate=False, lower_bound=-5.0, **kwargs"
    ),
    ("vllm.model_executor.layers.mamba.kda_checkpoint", "kda_prefill_checkpoint_alignment"): "backend",
    ("vllm.models.kimi_k3.nvidia.kda", "_flashkda_prefill"): (
        "q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, out, final_state, workspace, checkpoint_state=None, "
        "checkpoint_offsets=None"
    ),
    ("vllm.models.glm5next.common.kda", "Glm5NextLinearAttention._flashkda_prefill"): (
        "self, q, k, v, g, beta, initial_state, cu_seqlens, out, checkpoint=None, raw_qkv=None, conv_state=None, recurrent_state=None"
    ),
    **METHODS,
    (f"{_FLA}.kda", "fused_recurrent_kda"): (
        "q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=None, "
        "ssm_state_indices=None, **kwargs"
    ),
    (f"{_FLA}.kda", "fused_recurrent_kda_fwd"): (
        "q, k, v, g, beta, scale, initial_state, inplace_final_state=True, cu_seqlens=None, ssm_state_indices=None, "
        "num_accepted_tokens=None, use_qk_l2norm_in_kernel=False"
    ),
    (f"{_KIMI}.fused_recurrent", "fused_recurrent_kda"): (
        "q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens=None, "
        "out=None, fuse_gate=None"
    ),
    (f"{_KIMI}.fused_recurrent", "fused_recurrent_kda_packed_decode"): (
        "mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices, scale=None, out=None"
    ),
    (f"{_GLM}.kernels", "fused_recurrent_kda"): (
        "q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=None, "
        "ssm_state_indices=None, num_accepted_tokens=None, out=None, sigmoid_beta=False, a_log=None, g_bias=None, compute_gate=False, "
        "lower_bound=-5.0, **kwargs"
    ),
    ("vllm.model_executor.layers.mamba.linear.bailing_linear_attn", "bailing_linear_attention_decode_spec"): (
        "q, k, v, kv_cache, slope_rate, state_indices_tensor, query_start_loc, num_accepted_tokens, q_start, q_end, slot_start, slot_end, "
        "block_size"
    ),
    ("vllm.model_executor.layers.mamba.short_conv", "ShortConv.forward_cuda"): "self, hidden_states, output",
    ("vllm._custom_ops", "fused_kda_decode"): (
        "x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, state_indices, state, out=None, lower_bound=None, "
        "output_gate=None, norm_weight=None, norm_eps=1e-05"
    ),
    ("vllm._custom_ops", "fused_gdn_decode_post_conv_mtp"): (
        "mixed_qkv, a, b, A_log, dt_bias, state_indices, cu_seqlens, num_accepted_tokens, state, output_gate, norm_weight, out=None, "
        "scale=128**-0.5, norm_eps=1e-05, output_gate_activation='silu'"
    ),
    (f"{_FLA}.layernorm_guard", "layer_norm_fwd"): (
        "x, weight, bias, eps, z=None, out=None, group_size=None, norm_before_gate=True, is_rms_norm=False, activation='swish'"
    ),
    (f"{_FLA}.kda", "rms_norm_gated"): _NORM,
    (f"{_FLA}.fused_norm_gate", "rms_norm_gated"): _NORM,
    (f"{_OPS}.layernorm_gated", "rms_norm_gated"): "x, weight, bias, z=None, eps=1e-06, group_size=None, norm_before_gate=True",
    ("vllm.model_executor.layers.layernorm", "RMSNormGated.forward_native"): "self, x, z=None",
    (f"{_FLA}.kda", "FusedRMSNormGated.forward_native"): "self, x, g, residual=None, prenorm=False, residual_in_fp32=False",
    ("vllm.model_executor.layers.mamba.mamba_mixer2", "Mixer2RMSNormGated.forward_native"): "self, x, gate",
    ("vllm.model_executor.layers.lightning_attn", "lightning_attention"): _LIGHTNING,
    ("vllm.model_executor.layers.lightning_attn", "linear_decode_forward_triton"): _LIGHTNING_STEP,
    ("vllm.model_executor.layers.linear", "UnquantizedLinearMethod.apply"): _APPLY,
    ("vllm.model_executor.layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod.apply"): _APPLY,
    ("vllm.v1.attention.ops.merge_attn_states", "merge_attn_states"): (
        "output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None, prefill_tokens_with_context=None, output_scale=None"
    ),
    (f"{_MAMBA}.triton_ops.mamba_ssm", "selective_state_update"): (
        "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, pad_slot_id=-1, out=None, "
        "disable_state_update=False, intermediate_states_buffer=None, cache_steps=None, retrieve_parent_token=None, "
        "intermediate_state_indices=None, enable_stochastic_rounding=False, cache_philox_rounds=0"
    ),
    (f"{_MAMBA}.triton_ops.ssd_combined", "mamba_chunk_scan_combined"): (
        "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, chunk_indices=None, "
        "chunk_offsets=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float('inf')), out=None, return_final_states=False, "
        "return_varlen_states=False, return_intermediate_states=False, state_dtype=None, return_track_states=False, track_seq_idx=None, "
        "track_end_locs=None"
    ),
    (f"{_LAYERS}.mamba.mamba1", "MambaMixer1._selective_scan"): "*, x, dt, A, B, C, h0",  # a static method
    (f"{_LAYERS}.mamba.mamba1", "MambaMixer1._forward_prefill"): (
        "self, *, x, gate, out, A, conv_state, ssm_state, conv_weights, state_indices, query_start_loc, metadata, use_triton_causal_conv"
    ),
    (f"{_MAMBA}.causal_conv1d_triton", "causal_conv1d_update"): (
        "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None, num_accept_tokens=None, "
        "intermediate_conv_window=None, intermediate_state_indices=None, retrieve_next_token=None, retrieve_next_sibling=None, "
        "retrieve_parent_token=None, pad_slot_id=-1, metadata=None, validate_data=False"
    ),
    (f"{_LAYERS}.mamba.causal_conv1d", "causal_conv1d_update"): (
        "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None, pad_slot_id=-1"
    ),
    (f"{_LAYERS}.mamba.causal_conv1d", "causal_conv1d_fn"): (
        "x, weight, bias=None, query_start_loc=None, cache_indices=None, has_initial_state=None, conv_states=None, activation='silu', "
        "pad_slot_id=-1, **kwargs"
    ),
    (f"{_ATTENTION}.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode"): _PACKED,
    (f"{_ATTENTION}.linear.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update"): (
        "A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices, scale=None, "
        "use_qk_l2norm_in_kernel=False, cu_seqlens=None, is_kda=False, lower_bound=None, disable_state_update=False, "
        "intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=None, retrieve_parent_token=None, "
        "cache_ring=False, replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None, replayssm_beta=None, match_cutedsl_decode=False"
    ),
    (f"{_ATTENTION}.linear.kda_replayssm_spec_decode", "commit_kda_replayssm_spec_all_layers"): (
        "checkpoint_state, rawv_cache, rawk_cache, gk_cache, beta_cache, ssm_state_indices, accept_lens, max_cache_len, num_k_heads, "
        "mamba_track_indices=None, mamba_steps_to_track=None, use_qk_l2norm_in_kernel=True, null_block_id=0"
    ),
    (f"{_ATTENTION}.fla.chunk", "chunk_gated_delta_rule"): (
        "q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, cu_seqlens=None, head_first=False, "
        "use_qk_l2norm_in_kernel=False, inplace_update=True"
    ),
    (f"{_LAYERS}.linear.gdn_backend", "flashinfer_gdn_prefill_default"): "model_runner",
    (f"{_ATTENTION}.fla.fused_recurrent", "fused_recurrent_gated_delta_rule_update"): (
        "q, k, v, g, beta=None, scale=None, initial_state_source=None, initial_state_indices=None, cu_seqlens=None, "
        "use_qk_l2norm_in_kernel=False, disable_state_update=False, disable_output_calculation=False, intermediate_states_buffer=None, "
        "intermediate_state_indices=None, cache_steps=None, retrieve_parent_token=None"
    ),
    (f"{_ATTENTION}.fla.kda", "chunk_kda"): (
        "q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, "
        "A_log=None, dt_bias=None, lower_bound=None, output_intermediate_states=False, track_state=None, track_chunk_idx=None, "
        "beta_is_raw=False, chunk_indices=None, chunk_offsets=None, **kwargs"
    ),
    (f"{_ATTENTION}.fla.fused_recurrent", "fused_recurrent_kda_packed_decode"): f"{_PACKED}, lower_bound=None",
    (f"{_MAMBA}.causal_conv1d_triton", "causal_conv1d_fn"): (
        "x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, cache_indices=None, has_initial_state=None, activation='silu', "
        "pad_slot_id=-1, validate_data=False, block_table=None, **kwargs"
    ),
    (f"{_MAMBA}.lfm_short_conv", "fused_lfm_short_conv_decode"): "b, c, x, weight, state, cache_indices",
    ("sglang.srt.layers.quantization.unquant", "UnquantizedLinearMethod.apply"): _APPLY,
    (f"{_MAMBA}.lfm_short_conv", "fused_lfm_short_conv_prefill"): (
        "b, c, x, weight, state, query_start_loc, cache_indices, has_initial_state, max_seq_len"
    ),
    (f"{_ATTENTION}.triton_gdn_fused_proj", "fused_qkv_split_gdn_prefill"): (
        "mixed_qkv, num_q_heads, num_k_heads, num_v_heads, head_q, head_k, head_v"
    ),
    **{(f"sglang.srt.models.{module}", f"{owner}.forward"): "self, hidden_states, forward_batch" for module, owner in _FORWARD.items()},
    (f"{_ATTENTION}.kda_fused_decode", "kda_fused_decode"): (
        "mixed_qkv, a, b, conv_states, w_q_t, w_k_t, w_v_t, conv_bias, A_log, dt_bias, onorm_g, onorm_weight, ssm_states, cache_indices, "
        "scale, onorm_eps, lower_bound=None"
    ),
    (f"{_ATTENTION}.fla.fused_norm_gate", "rms_norm_gated"): _NORM,
    (f"{_ATTENTION}.fla.layernorm_gated", "rms_norm_gated"): (
        "*, x, weight, bias, z=None, eps=1e-06, group_size=None, norm_before_gate=True, is_rms_norm=False, activation='swish'"
    ),
    # This module imports it from sgl_kernel.
    (f"{_LAYERS}.flashattention_backend", "merge_state_v2"): "v_a, s_a, v_b, s_b, v_merged=None, s_merged=None",
    (f"{_ATTENTION}.linear.lightning_attn", "lightning_attention"): _LIGHTNING,
    (f"{_ATTENTION}.linear.lightning_attn", "linear_decode_forward_triton"): _LIGHTNING_STEP,
    (f"{_ATTENTION}.linear.seg_la", "seg_la_fwd"): (
        "q, k, v, s, decay_scales, meta, caches=None, cache_indices=None, track_lens=None, track_state_indices=None, softmax_scale=None"
    ),
    (f"{_LAYERS}.linear.kernels.gdn_triton", "TritonGDNKernel.extend"): (
        "self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, inplace_update=True, **kwargs"
    ),
    (f"{_LAYERS}.merge_state", "merge_state"): "prefix_output, prefix_lse, suffix_output, suffix_lse, output=None, output_lse=None",
}

FUNCTIONS = dict(SIGNATURES)
SIGNATURES |= WRAPPED

_CONV = f"from {_OPS}.causal_conv1d import causal_conv1d_fn, causal_conv1d_update"
_MERGE = "from vllm.v1.attention.ops.merge_attn_states import merge_attn_states"
_BAILING = "chunk_kda, fused_recurrent_kda, fused_recurrent_kda_fwd"
_PACKED_AND_SIGMOID = "fused_recurrent_gated_delta_rule_packed_decode, fused_sigmoid_gating_delta_rule_update"
_TRITON = f"from {_MAMBA}.causal_conv1d_triton import causal_conv1d_update as causal_conv1d_update_triton"
_WRAPPED = f"from {_LAYERS}.mamba.causal_conv1d import causal_conv1d_fn, causal_conv1d_update"

# The backend takes the function when it is constructed, and passes optional arguments by name.
_DISPATCH = """\
class TritonSSUBackend:
    def __init__(self, config=None):
        from {ops} import selective_state_update
        self.config, self.kernel = config, selective_state_update

    def __call__(self, state, x, dt, A, B, C, **options):
        c = self.config
        self.kernel(state, x, dt, A, B, C, **options{noise})

def selective_state_update(*args, **kwargs):
    from {ops} import selective_state_update as kernel
    return kernel(*args, **kwargs)
"""

# The layers call an object of this class, which has a method for each backend.
_CUSTOM_OP = """\
from {fla} import chunk_gated_delta_rule as fla_chunk_gated_delta_rule

class ChunkGatedDeltaRule:
    def forward_native(self, q, k, v, g, beta, **options):
        return fla_chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, **options)

    def forward_cuda(self, q, k, v, g, beta, **options):
        return fi_chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, **options)
"""

_ALIGNMENT = "from vllm.model_executor.layers.mamba.kda_checkpoint import kda_prefill_checkpoint_alignment"

# The layers' buffers are parts of this workspace.
_WORKSPACES = """\
def current_workspace_manager():
    from types import SimpleNamespace
    from torch import full
    return SimpleNamespace(get_simultaneous=lambda *specs: [full(shape, 77, dtype=dtype) for shape, dtype in specs])
"""

# The context of a step, by each layer's name.
_CONTEXT = """\
def get_forward_context():
    raise AssertionError("a test puts one here")

def is_conv_state_dim_first():
    return False
"""

_STEPS = """\
def get_attn_backend():
    raise AssertionError("a test puts one here")
"""

# Imported when a step has prompts.
_PREFILL = f"""\
def prefill(**call):
    from {_KIMI} import chunk_kda_with_fused_gate
    return chunk_kda_with_fused_gate(**call)
"""

IMPORTS = {
    _FLA: (
        "from .chunk import chunk_gated_delta_rule\n"
        "from .fused_recurrent import fused_recurrent_gated_delta_rule, fused_recurrent_gated_delta_rule_packed_decode\n"
        "from .fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update"
    ),
    "vllm.model_executor.layers.mamba.mamba_mixer": f"{_CONV}\nfrom {_OPS}.mamba_ssm import selective_scan_fn",
    "vllm.model_executor.layers.mamba.mamba_mixer2": (
        f"{_CONV}\nfrom {_OPS}.ssd_combined import mamba_chunk_scan_combined_varlen\nfrom {_OPS}.layernorm_gated import rms_norm_gated\n"
        f"from {_OPS}.selective_state_update_replayssm_output_only import selective_state_update_replayssm_output_only"
    ),
    "vllm.model_executor.layers.mamba.short_conv": f"{_CONV}\n{_CONTEXT}",
    f"{_GDN}.qwen_gdn_linear_attn": (
        f"{_CONV}\n{_CUSTOM_OP.format(fla=_FLA)}\n{_WORKSPACES}\n{_CONTEXT}\nfrom {_FLA} import {_PACKED_AND_SIGMOID}"
    ),
    f"{_GDN}.olmo_gdn_linear_attn": f"{_CONV}\n{_CONTEXT}\nfrom {_FLA} import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule",
    f"{_GDN}.kimi_gdn_linear_attn": f"from ..ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update\n{_PREFILL}\n{_CONTEXT}",
    "vllm.model_executor.models.bailing_moe_v3": f"{_CONV}\n{_CONTEXT}\nfrom {_FLA}.kda import {_BAILING}",
    _KIMI: (
        "from .chunk import chunk_kda_with_fused_gate\nfrom .fused_recurrent import fused_recurrent_kda, fused_recurrent_kda_packed_decode"
    ),
    _GLM: "from .kernels import chunk_kda_with_fused_gate, fused_recurrent_kda",
    "vllm.models.muse_spark.nvidia.model": f"from {_FLA}.fused_norm_gate import rms_norm_gated",
    "vllm.model_executor.layers.mamba.linear.minimax_linear_attn": (
        "from vllm.model_executor.layers.lightning_attn import lightning_attention, linear_decode_forward_triton"
    ),
    "vllm.models.kimi_k3.nvidia.kda": f"{_CONV}\n{_ALIGNMENT}\n{_PREFILL}\n{_WORKSPACES}\n{_CONTEXT}",
    "vllm.models.kimi_k3.nvidia.mla": _MERGE,
    "vllm.models.kimi_k3.amd.kda": _CONV,
    "vllm.models.glm5next.common.kda": (
        f"{_CONV}\n{_ALIGNMENT}\n{_WORKSPACES}\n{_CONTEXT}\nfrom {_GLM} import chunk_kda_with_fused_gate, fused_recurrent_kda"
    ),
    "vllm.models.qwen4_exp.nvidia.ple_layer": "from ..common.ops.ple import ple_conv",
    "vllm.models.qwen4_exp.amd.ple_layer": "from ..common.ops.ple import ple_conv",
    "vllm.v1.attention.backends.flash_attn": _MERGE,
    "vllm.v1.attention.backends.rocm_aiter_fa": _MERGE,
    "vllm.v1.attention.backends.flashinfer": _MERGE,
    "vllm.model_executor.layers.attention.mla_attention": _MERGE,
    "vllm.model_executor.layers.attention.sparse_mla_attention": _MERGE,
    # The dispatcher's own function has the same name but differs, and must stay.
    f"{_OPS}.ssu_dispatch": _DISPATCH.format(
        ops=f"{_OPS}.mamba_ssm",
        noise=", enable_stochastic_rounding=c.enable_stochastic_rounding, cache_philox_rounds=c.stochastic_rounding_philox_rounds",
    ),
    f"{_LAYERS}.linear.gdn_backend": (
        f"from {_MAMBA}.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update\n"
        f"from {_LAYERS}.mamba.causal_conv1d import causal_conv1d_fn as causal_conv1d_fn_cuda\n"
        "causal_conv1d_fn = causal_conv1d_fn_cuda\n"
        f"from {_ATTENTION}.triton_gdn_fused_proj import fused_qkv_split_gdn_prefill\n"
        f"from {_LAYERS}.linear.kernels.gdn_triton import TritonGDNKernel"
    ),
    f"{_LAYERS}.linear.kda_backend": f"from {_MAMBA}.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update",
    f"{_LAYERS}.linear.kda_prefill_graph": f"from {_MAMBA}.causal_conv1d_triton import causal_conv1d_fn",
    f"{_LAYERS}.mamba.mixer2_rms_norm_gated": f"from {_ATTENTION}.fla.layernorm_gated import rms_norm_gated",
    f"{_MAMBA}.triton_ops": "from .ssd_combined import mamba_chunk_scan_combined",
    f"{_LAYERS}.mamba.causal_conv1d": (
        f"from {_MAMBA}.causal_conv1d_triton import causal_conv1d_fn as _causal_conv1d_fn_triton\n"
        f"from {_MAMBA}.causal_conv1d_triton import causal_conv1d_update as _causal_conv1d_update_triton"
    ),
    f"{_LAYERS}.mamba.mamba": f"from {_MAMBA}.triton_ops import mamba_chunk_scan_combined\n{_TRITON}\n{_WRAPPED}",
    f"{_LAYERS}.mamba.mamba1": (f"from {_LAYERS}.mamba.mamba import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_update_triton"),
    _RING: "fused_recurrent_gdn_replayssm_decode = fused_recurrent_linear_replayssm_decode",
    f"{_LAYERS}.linear.kernels.gdn_triton": (
        f"from {_RING} import fused_recurrent_gdn_replayssm_decode\nfrom {_ATTENTION}.fla.chunk import chunk_gated_delta_rule\n"
        f"from {_ATTENTION}.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode\n"
        f"from {_ATTENTION}.linear.fused_sigmoid_gating_recurrent import fused_sigmoid_gating_delta_rule_update"
    ),
    f"{_LAYERS}.linear.kernels.kda_triton": (
        f"from {_RING} import fused_recurrent_linear_replayssm_decode\nfrom {_ATTENTION}.fla.kda import chunk_kda\n"
        f"from {_ATTENTION}.fla.fused_recurrent import fused_recurrent_kda_packed_decode\n"
        f"from {_ATTENTION}.linear.fused_sigmoid_gating_recurrent import fused_sigmoid_gating_delta_rule_update"
    ),
    # This module's own function has the same name but differs.
    f"{_ATTENTION}.helion.kda_prefill": f"from {_ATTENTION}.fla.kda import chunk_kda as triton_chunk_kda",
    f"{_LAYERS}.linear.lightning_backend": (
        f"from {_ATTENTION}.linear.lightning_attn import lightning_attention, linear_decode_forward_triton\n"
        f"from {_ATTENTION}.linear.seg_la import seg_la_fwd"
    ),
    "sglang.srt.models.jet_nemotron": f"from {_ATTENTION}.fla.fused_recurrent import fused_recurrent_gated_delta_rule_update",
    "sglang.srt.model_executor.forward_context": _STEPS,
    # The split of Qwen3-Next's projections, a kernel of SGLang's own; a test puts one here.
    "sglang.srt.models.qwen3_next": "fused_qkvzba_split_reshape_cat = None",
    # SGLang's own functions; a test puts others here.
    "sglang.srt.models.qwen4_exp": "get_req_to_token_pool = _ple_track_targets = None",
    "sglang.srt.models.lfm2": f"{_TRITON}\n{_WRAPPED}",
    "sglang.srt.models.lfm2_moe": (
        f"{_WRAPPED}\nfrom {_MAMBA}.lfm_short_conv import fused_lfm_short_conv_decode, fused_lfm_short_conv_prefill"
    ),
    f"{_MAMBA}.triton_ops.ssu_dispatch": _DISPATCH.format(ops=f"{_MAMBA}.triton_ops.mamba_ssm", noise=""),
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha": f"from {_LAYERS}.merge_state import merge_state",
}
