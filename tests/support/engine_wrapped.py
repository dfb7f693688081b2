"""Parameters of the engines' functions that the plugins wrap. A default ... is any.

These are methods for batch-invariant modes and for the key of vLLM's graphs, and checks of options.
"""

from __future__ import annotations

_BACKENDS, _SCHEDULER = "vllm.v1.attention.backends", "vllm.v1.core.sched.scheduler"
_MANAGERS = "sglang.srt.managers"
BACKENDS = {
    f"{_BACKENDS}.mamba1_attn": ("Mamba1AttentionBackend",),
    f"{_BACKENDS}.mamba2_attn": ("Mamba2AttentionBackend",),
    f"{_BACKENDS}.short_conv_attn": ("ShortConvAttentionBackend",),
    f"{_BACKENDS}.linear_attn": ("LinearAttentionBackend", "BailingLinearAttentionBackend"),
    f"{_BACKENDS}.gdn_attn": ("GDNAttentionBackend",),
    "vllm.models.kimi_k3.nvidia.kda_metadata": ("KimiK3KDAAttentionBackend",),
}
WRAPPED = {(m, f"{owner}.supports_batch_invariance"): "cls" for m, owners in BACKENDS.items() for owner in owners}
WRAPPED |= {
    (_SCHEDULER, "Scheduler.__init__"): (
        "self, vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size=None, mm_registry=..., "
        "include_finished_set=False, log_stats=False"
    ),
    (_SCHEDULER, "Scheduler.schedule"): "self, throttle_prefills=False",
    (_SCHEDULER, "Scheduler._mamba_block_aligned_split"): (
        "self, request, num_new_tokens, num_new_local_computed_tokens=0, num_external_computed_tokens=0"
    ),
    (_SCHEDULER, "Scheduler._try_schedule_encoder_inputs"): (
        "self, request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens=0"
    ),
    (_SCHEDULER, "Scheduler._get_local_prefix_cache_hit"): "self, request, max_cache_hit_length=None",
    ("vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator.cache_blocks"): "self, request, num_computed_tokens",
    ("vllm.envs", "compile_factors"): "",
    ("vllm.platforms.interface", "Platform._align_hybrid_block_size"): "cls, vllm_config, backend_cls",
    ("vllm.config.mamba", "MambaConfig.__post_init__"): "self",
    ("sglang.srt.arg_groups.mamba_hook", "handle_mamba_backend"): "server_args",
    (f"{_MANAGERS}.scheduler", "Scheduler.init_mamba_truncation_align"): "self",
    (f"{_MANAGERS}.schedule_policy", "PrefillAdder.floor_chunked_tokens"): "self, trunc_len, remaining",
    (f"{_MANAGERS}.schedule_policy", "PrefillAdder.add_one_req_ignore_eos"): "self, req",
    (f"{_MANAGERS}.schedule_batch", "ScheduleBatch.retract_decode"): "self",
}
