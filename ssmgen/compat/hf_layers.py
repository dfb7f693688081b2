"""Whole decode layers of transformers' models: what `patch(fuse=True)` puts in the place of a mixer's forward.

A decode step goes from the in-projection to the out-projection in one call of ssmgen's, a prompt in one call each of its convolution, its
scan and its norm. All else, training and compiled prompts among it, is the original forward's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..calls.checks import DTYPES
from ..families.delta_layer import call as native_gdn
from ..families.mamba2_layer import call as native_mamba2
from . import hf_projections as projections
from . import hf_prompts as prompts
from .hf_functions import Replacement, attempt, call, other_forward

_ATTRIBUTE = "_ssmgen_arrivals"  # of a layer of transformers' cache, beside the states that it belongs to


def is_captured(tensor: Tensor) -> bool:
    """Whether work on the tensor goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def arrivals(layer: Any, groups: int, state: Tensor) -> Tensor:
    """[slots, groups] zeros that stay with a layer of the cache, beside its state; in compiled code, and in captured code that finds none
    of this shape, new ones in each step."""
    shape = (state.shape[0], groups)
    if is_compiling():
        return state.new_zeros(shape, dtype=torch.int32)
    found = getattr(layer, _ATTRIBUTE, None)
    if found is None or found.shape != shape or found.device != state.device:
        found = state.new_zeros(shape, dtype=torch.int32)
        if not is_captured(state):  # else they are zeros only when the graph is replayed
            setattr(layer, _ATTRIBUTE, found)
    return found


def is_step(mixer: Any, hidden_states: Tensor, cache_params: Any, attention_mask: Tensor | None) -> bool:
    """Whether a forward is a decode step that may be fused."""
    if cache_params is None or attention_mask is not None or hidden_states.shape[1] != 1 or torch.is_grad_enabled():
        return False
    if mixer.activation not in ("silu", "swish") or projections.is_elsewhere(mixer.conv1d):
        return False
    if is_compiling() and hidden_states.dtype not in DTYPES:
        return False
    layer = cache_params.layers[mixer.layer_idx]
    return cache_params.has_previous_state(mixer.layer_idx, state_idx=0) and not getattr(layer, "record_past", False)


def mamba2(project: Callable[[Any, Tensor], Tensor], mixer: Any, hidden_states: Tensor, cache_params: Any) -> Tensor:
    """hidden_states [batch, 1, hidden] of Mamba2Mixer and its kin; project: the in-projection."""
    layer = cache_params.layers[mixer.layer_idx]
    window, state = layer.conv_states[0], layer.recurrent_states[0]
    heads, inner, conv = mixer.num_heads, mixer.num_heads * mixer.head_dim, mixer.conv1d
    z, xBC, dt = project(mixer, hidden_states).squeeze(1).split([inner, window.shape[1], heads], dim=1)
    y = call(
        native_mamba2.mamba2_layer, xBC, dt, z, window, state, arrivals(layer, mixer.n_groups, state), conv.weight.squeeze(1), conv.bias,
        mixer.A_log, mixer.D, mixer.dt_bias, A_is_log=True, **_norm(mixer, inner),
    )  # fmt: skip
    return mixer.out_proj(y.unsqueeze(1).to(hidden_states.dtype))  # Falcon-H1's multipliers may be f32 where its weights are not


def _norm(mixer: Any, channels: int) -> dict[str, Any]:
    """What mamba2_layer is told of the gated norm; nothing where the gate is by itself, which Falcon-H1 may have."""
    if not mixer.__dict__.get("mamba_rms_norm", True):
        return {}
    norm = mixer.norm
    told = norm.__dict__
    return {
        "norm_weight": norm.weight,
        "norm_eps": norm.variance_epsilon,
        "norm_group_size": told.get("group_size") or channels // told.get("n_groups", 1),
        "norm_before_gate": told.get("norm_before_gate", False),
    }


def gated_delta_net(project: Callable[[Any, Tensor], tuple[Tensor, ...]], mixer: Any, hidden_states: Tensor, cache_params: Any) -> Tensor:
    """hidden_states [batch, 1, hidden] of Qwen3NextGatedDeltaNet and its kin; project: the in-projections."""
    layer = cache_params.layers[mixer.layer_idx]
    window, state = layer.conv_states[0], layer.recurrent_states[0]
    mixed, z, b, a = (t.squeeze(1) for t in project(mixer, hidden_states))
    conv, norm = mixer.conv1d, mixer.norm
    y = call(
        native_gdn.gdn_layer, mixed, a, b, z, window, state, arrivals(layer, mixer.num_k_heads, state), conv.weight.squeeze(1), conv.bias,
        mixer.A_log, mixer.dt_bias, norm.weight, norm_eps=norm.variance_epsilon, state_layout="kv",
    )  # fmt: skip
    return mixer.out_proj(y.unsqueeze(1))


def kimi_delta_attention(
    project: Callable[[Any, Tensor], tuple[Tensor, Tensor]], bound_of: Callable[[Any], float | None], mixer: Any, hidden_states: Tensor,
    cache_params: Any,
) -> Tensor:  # fmt: skip
    """hidden_states [batch, 1, hidden] of KimiLinearDeltaAttention and its kin; project: what makes gates; bound_of: their lower bound."""
    layer = cache_params.layers[mixer.layer_idx]
    window, state = layer.conv_states[0], layer.recurrent_states[0]
    mixed = projections.qkv(mixer, hidden_states)
    gate, z = project(mixer, hidden_states)
    conv, forget, norm = mixer.conv1d, mixer.forget_gate, mixer.o_norm
    y = call(
        native_gdn.kda_layer, mixed.squeeze(1), gate.squeeze(1), mixer.b_proj(hidden_states).squeeze(1), z.squeeze(1), window, state,
        arrivals(layer, mixer.num_heads, state), conv.weight.squeeze(1), conv.bias, forget.A_log.flatten(), forget.dt_bias, norm.weight,
        lower_bound=bound_of(forget), norm_eps=norm.variance_epsilon, norm_activation=norm.activation, state_layout="kv",
    )  # fmt: skip
    return mixer.o_proj(y.unsqueeze(1))


class Fused(NamedTuple):
    """A class of a modeling file, and its decode step."""

    name: str
    step: Callable[[Any, Tensor, Any], Tensor]
    masked: bool = False  # a step without padding has a mask too, [batch, 1]


LAYERS: dict[str, Fused] = {
    "mamba2": Fused("Mamba2Mixer", partial(mamba2, projections.in_proj)),
    "bamba": Fused("BambaMixer", partial(mamba2, projections.in_proj)),
    "falcon_h1": Fused("FalconH1Mixer", partial(mamba2, projections.falcon_h1)),
    "granitemoehybrid": Fused("GraniteMoeHybridMambaLayer", partial(mamba2, projections.in_proj)),
    "nemotron_h": Fused("NemotronHMamba2Mixer", partial(mamba2, projections.in_proj)),
    "zamba2": Fused("Zamba2MambaMixer", partial(mamba2, projections.in_proj)),
    "qwen3_next": Fused("Qwen3NextGatedDeltaNet", partial(gated_delta_net, projections.qwen3_next)),
    "qwen3_5": Fused("Qwen3_5GatedDeltaNet", partial(gated_delta_net, projections.qwen3_5)),
    "qwen3_5_moe": Fused("Qwen3_5MoeGatedDeltaNet", partial(gated_delta_net, projections.qwen3_5)),
    "kimi_linear": Fused("KimiLinearDeltaAttention", partial(kimi_delta_attention, projections.kimi, projections.no_bound)),
    "glm5_next": Fused("Glm5NextTextLinearAttention", partial(kimi_delta_attention, projections.kimi, projections.glm_bound), masked=True),
    "bailing_hybrid": Fused("BailingHybridDeltaAttention", partial(kimi_delta_attention, projections.bailing, projections.bailing_bound)),
}
"""Mixers with decode steps, by the name of transformers' model folder."""
CLASSES = {"mamba": "MambaMixer", "falcon_mamba": "FalconMambaMixer", "jamba": "JambaMambaMixer"}
CLASSES |= {name: fused.name for name, fused in LAYERS.items()}
"""Mixers whose forward is replaced; of Mamba's only prompts are."""


def objection(mixer: type) -> str:
    """What keeps a mixer's forward from being replaced, or nothing."""
    return other_forward(mixer, "self", "hidden_states", "cache_params", "attention_mask")


def run(replacement: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a mixer's forward.

    What a prompt's calls refuse goes on to the original forward, whose functions are replaced as well and say why.
    """
    name = replacement.module.__name__
    fused, layer = next((fused for fused in LAYERS.values() if fused.name == name), None), prompts.PROMPTS[name]
    refused: WeakSet[torch.nn.Module] = WeakSet()  # mixers that are not asked again: their projections would be computed twice
    unread: WeakSet[torch.nn.Module] = WeakSet()  # the same, of prompts

    def run(self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        masks = fused is not None and fused.masked and attention_mask is not None and attention_mask.shape == hidden_states.shape[:2]
        if fused is not None and is_step(self, hidden_states, cache_params, None if masks else attention_mask):
            if not is_compiling() and self in refused:
                replacement.kept += 1
            else:
                given = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype) if masks else hidden_states
                result, reason = attempt(replacement, fused.step, self, given, cache_params)
                if reason is None:
                    return result
                refused.add(self)
                replacement.keep(reason)
        elif prompts.is_prompt(self, hidden_states, cache_params, attention_mask, kwargs) and self not in unread:
            result, reason = attempt(replacement, prompts.run, layer, self, hidden_states, cache_params, attention_mask)
            if reason is None:
                return result
            unread.add(self)
        return original(self, hidden_states, cache_params, attention_mask, **kwargs)

    return run
