"""Tiny models of transformers: how one or more of every kind that ssmgen.compat.hf knows is made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_COMMON = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128}
# Heads of Mamba-2 and of delta rules are as narrow as a prompt's kernels take them
_MAMBA2_HYBRID = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2, "mamba_chunk_size": 4,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
}  # fmt: skip

_LATENT = {
    "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16,
}  # fmt: skip

_INKLING = {
    "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 64, "d_rel": 4,
    "rel_extent": 16, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "num_hidden_layers": 2, "layer_types": ["hybrid_sliding", "hybrid"], "unpadded_vocab_size": 64,
}  # fmt: skip

_IMAGES = {
    "glm5_next": {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32, "projection_intermediate_size": 16,
    },
}  # fmt: skip

_SEE = ("qwen3_5", "qwen3_5_moe", "qwen4_exp", "inkling", "inkling2", "inkling2_loop")

# Configuration arguments of each model, by its folder's name
TINY: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "num_hidden_layers": 3},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "num_hidden_layers": 3},  # a norm takes 4 or more of them
    "jamba": {
        **_ATTENTION,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "zamba": {
        **_ATTENTION,
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "num_hidden_layers": 3, "chunk_size": 4},
    "bamba": {**_ATTENTION, **_MAMBA2_HYBRID, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {**_ATTENTION, **_MAMBA2_HYBRID, "num_hidden_layers": 2, "mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": {
        **_ATTENTION,
        **_MAMBA2_HYBRID,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        **_ATTENTION,
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 4,
        "head_dim": 8,
    },
    "zamba2": {
        **_ATTENTION,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
        "chunk_size": 4,
        "num_mem_blocks": 1,
    },
    "qwen3_next": {**_ATTENTION, **_EXPERTS, **_GDN},
    "qwen3_5": {**_ATTENTION, **_GDN},
    "qwen3_5_moe": {**_ATTENTION, **_EXPERTS, **_GDN},
    "qwen4_exp": {
        **_ATTENTION,
        **_EXPERTS,
        **_GDN,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "hc_lowrank": 8,
    },
    "lara_mini": {
        **_ATTENTION,
        **_EXPERTS,
        **_GDN,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 4,
        "sliding_window": 64,
    },
    "olmo_hybrid": {**_ATTENTION, **_GDN, "linear_value_head_dim": 32, "linear_num_key_heads": 4},
    "kimi_linear": {
        **_ATTENTION,
        **_LATENT,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "glm5_next": {
        **_ATTENTION,
        **_LATENT,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 0,
        "hc_mult": 2,
        "index_topk": 4,
        "index_kpool": 2,
        "index_head_dim": 8,
        "index_n_heads": 2,
    },
    "bailing_hybrid": {
        **_ATTENTION,
        **_LATENT,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 8,
        "num_mtp_layers": 0,
    },
    "lfm2": {**_ATTENTION, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "lfm2_moe": {**_ATTENTION, **_EXPERTS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "inkling": {**_ATTENTION, **_INKLING, "intermediate_size": 48, "mlp_layer_types": ["dense", "sparse"]},
    "inkling2": {**_ATTENTION, **_INKLING},
    "inkling2_loop": {
        **_ATTENTION,
        **_INKLING,
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
    },
    "lfm3": {**_ATTENTION, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
}


def tiny(name: str, **changes: Any) -> torch.nn.Module:
    """A model of the kind, in f32, in evaluation mode, on the CPU; the same one at every call."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    text = {**_COMMON, **TINY[name], **changes}
    if name in _IMAGES:
        tokens = {
            f"{kind}_token_id": 50 + i for i, kind in enumerate(("image", "video", "image_start", "image_end", "video_start", "video_end"))
        }
        config, maker = AutoConfig.for_model(name, text_config=text, vision_config=_IMAGES[name], **tokens), AutoModelForImageTextToText
    else:
        kind = f"{name}_text" if name in _SEE else name  # their folders also hold models that see
        config, maker = AutoConfig.for_model(kind, **text), AutoModelForCausalLM
    torch.manual_seed(0)
    return maker.from_config(config).eval()


def compiled_nodes(step: Any, *args: Any) -> tuple[Any, Counter[str]]:
    """(result of the step compiled into one graph, how often each operator of ssmgen is called in it)"""
    targets: Counter[str] = Counter()

    def backend(graph: Any, inputs: Any) -> Any:
        targets.update(str(node.target).split(".")[1] for node in graph.graph.nodes if str(node.target).startswith("ssmgen."))
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(step, backend=backend, fullgraph=True)(*args), targets
