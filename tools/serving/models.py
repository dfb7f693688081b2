"""The served models: models of tools.demo, as wide as a public model, with fewer layers and a vocabulary in proportion to the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tools.demo.presets import Preset, presets


@dataclass(frozen=True, slots=True)
class Served:
    """architecture: vLLM's class   whole, vocabulary: layers and tokens of the public model   layers: number of layers in timed engines

    page: bytes of one layer's state for a sequence, including its convolution's, for a model with 16 bits; in hybrids an attention layer
    has pages of the same size   more: fields of the public model's configuration that tools.demo's lacks
    of_kinds: further ones, from the kinds of the layers   preset: tools.demo's, if it has another name
    narrow: whether vLLM keeps its states in f16 on request

    The head takes the same share of a step as in the public model. The number of layers leaves six engines enough memory for the states of
    256 sequences each on a GPU with 140 GiB.
    """

    architecture: str
    whole: int
    vocabulary: int
    layers: int
    page: int
    more: Mapping[str, Any] = field(default_factory=dict)
    of_kinds: Callable[[Sequence[str]], Mapping[str, Any]] = lambda kinds: {}
    preset: str = ""
    narrow: bool = True


def _kimi(kinds: Sequence[str], heads: int, **gate: Any) -> dict[str, Any]:
    """Fields of the public configuration that transformers' own replaces by others. Layers count from 1.

    gate: fields of Kimi-K3's. All layers have a dense MLP: a router would send tokens to other experts for a rounding.
    """
    kda = [number for number, kind in enumerate(kinds, 1) if kind == "linear_attention"]
    others = [number for number, kind in enumerate(kinds, 1) if kind != "linear_attention"]
    layers = {"kda_layers": kda, "full_attn_layers": others, "num_heads": heads, "head_dim": 128, "short_conv_kernel_size": 4} | gate
    return {"linear_attn_config": layers, "mla_use_nope": True, "first_k_dense_replace": len(kinds)}


MODELS = {
    "mamba2": Served("Mamba2ForCausalLM", 64, 32768, 20, 2_160_000),
    "nemotron_h": Served("NemotronHForCausalLM", 52, 131072, 16, 4_260_000, {"mamba_ssm_cache_dtype": "float32"}),
    "qwen3_5": Served("Qwen3_5ForCausalLM", 32, 248320, 12, 2_150_000, {"mamba_ssm_dtype": "float32"}),
    "qwen3_next": Served("Qwen3NextForCausalLM", 48, 151936, 12, 1_100_000),
    "olmo_hybrid": Served("OlmoHybridForCausalLM", 32, 100352, 12, 1_180_000),
    # vLLM has no f16 states of KDA; a page of latent attention has a multiple of 128 tokens
    "kimi_linear": Served("KimiLinearForCausalLM", 27, 163840, 12, 2_220_000, of_kinds=partial(_kimi, heads=32), narrow=False),
    # one of 8 ranks of Kimi-K3's text model, without its residual attention and with SiLU
    "kimi_k3": Served(
        "KimiLinearForCausalLM", 92, 163840, 12, 890_000,
        {
            "hidden_size": 7168, "intermediate_size": 4224, "num_attention_heads": 12, "num_key_value_heads": 12, "linear_num_heads": 12,
            "q_lora_rank": 1536, "mla_use_output_gate": True,
        },
        partial(_kimi, heads=12, use_full_rank_gate=True, gate_lower_bound=-5.0), "kimi_linear", narrow=False,
    ),
}  # fmt: skip
TIMED = ("mamba2", "nemotron_h", "qwen3_5")
FEW = 4  # layers if only answers are compared; more if the model has more kinds of layers


def preset_of(model: str) -> Preset:
    return presets()[MODELS[model].preset or model]


def config_of(model: str, layers: int, longest: int) -> Any:
    """transformers' configuration, for sequences of up to `longest` tokens. Raises DemoError if transformers lacks the family."""
    served, preset = MODELS[model], preset_of(model).for_prompts
    kinds = preset.kinds(layers)
    layers = len(kinds)
    own = {
        "vocab_size": math.ceil(served.vocabulary * layers / served.whole / 64) * 64,
        "max_position_embeddings": longest,
        "architectures": [served.architecture],
    }
    return replace(preset, sizes={**preset.sizes, **served.more, **served.of_kinds(kinds), **own}).config(layers)


def prefix_block(model: str) -> int | None:
    """Tokens of a block, for an engine with a cache of prefixes; None where vLLM chooses. In a model without attention it would choose 16,
    which is no multiple of 64; in a hybrid it chooses pages as large as a state."""
    return None if any("attention" in kind.replace("linear_attention", "") for kind in preset_of(model).kinds(FEW)) else 512


def pool_bytes(model: str, layers: int, sequences: int, wide: bool) -> int:
    """Bytes for states and keys of `sequences` sequences, at one page per layer, plus a tenth. wide: f32 instead of 16 bits."""
    kinds = preset_of(model).kinds(layers)
    return round(1.1 * (sequences + 8) * sum(kind not in ("mlp", "moe") for kind in kinds)) * MODELS[model].page * (2 if wide else 1)
