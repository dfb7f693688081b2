"""Whole decode layers of transformers' models: `patch(fuse=True)` replaces a mixer's forward with them.

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

from ...calls.checks import DTYPES
from ...families.delta_layer import call as native_gdn
from ...families.mamba2_layer import call as native_mamba2
from . import projections, prompts
from .elsewhere import is_elsewhere
from .functions import call
from .replacements import Replacement, attempt
from .roles import Roles

_ATTRIBUTE = "_ssmgen_arrivals"  # of a layer of transformers' cache, which also holds the states


def is_captured(tensor: Tensor) -> bool:
    """Whether work on the tensor goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def arrivals(layer: Any, groups: int, state: Tensor) -> Tensor:
    """[slots, groups] zeros that a layer of the cache keeps with its state. Compiled code makes new ones in each step, and so does
    captured code that finds none of this shape."""
    shape = (state.shape[0], groups)
    if is_compiling():
        return state.new_zeros(shape, dtype=torch.int32)
    found = getattr(layer, _ATTRIBUTE, None)
    if found is None or found.shape != shape or found.device != state.device:
        found = state.new_zeros(shape, dtype=torch.int32)
        if not is_captured(state):  # else they are zeros only when the graph is replayed
            setattr(layer, _ATTRIBUTE, found)
    return found


def is_step(mixer: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None) -> bool:
    """Whether a forward is a decode step that may be fused."""
    if cache is None or attention_mask is not None or hidden_states.shape[1] != 1 or torch.is_grad_enabled():
        return False
    if mixer.activation not in ("silu", "swish") or is_elsewhere(mixer.conv1d):
        return False
    if is_compiling() and hidden_states.dtype not in DTYPES:
        return False
    layer = cache.layers[mixer.layer_idx]
    return cache.has_previous_state(mixer.layer_idx, state_idx=0) and not getattr(layer, "record_past", False)


def mamba2(project: Callable[[Any, Tensor], Tensor], mixer: Any, hidden_states: Tensor, cache: Any) -> Tensor:
    """hidden_states [batch, 1, hidden] of Mamba2Mixer and its kin; project: the in-projection."""
    layer = cache.layers[mixer.layer_idx]
    window, state = layer.conv_states[0], layer.recurrent_states[0]
    heads, inner, conv = mixer.num_heads, mixer.num_heads * mixer.head_dim, mixer.conv1d
    z, xBC, dt = project(mixer, hidden_states).squeeze(1).split([inner, window.shape[1], heads], dim=1)
    y = call(
        native_mamba2.mamba2_layer, xBC, dt, z, window, state, arrivals(layer, mixer.n_groups, state), conv.weight.squeeze(1), conv.bias,
        mixer.A_log, mixer.D, mixer.dt_bias, A_is_log=True, **_norm(mixer, inner),
    )  # fmt: skip
    out: Tensor = mixer.out_proj(y.unsqueeze(1).to(hidden_states.dtype))  # Falcon-H1's multipliers may be f32 where its weights are not
    return out


def _norm(mixer: Any, channels: int) -> dict[str, Any]:
    """mamba2_layer's arguments for the gated norm; empty if the gate has no norm, as Falcon-H1 may be configured."""
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


def gated_delta_net(project: Callable[[Any, Tensor], tuple[Tensor, ...]], mixer: Any, hidden_states: Tensor, cache: Any) -> Tensor:
    """hidden_states [batch, 1, hidden] of Qwen3NextGatedDeltaNet and its kin; project: the in-projections."""
    layer = cache.layers[mixer.layer_idx]
    window, state = layer.conv_states[0], layer.recurrent_states[0]
    mixed, z, b, a = (t.squeeze(1) for t in project(mixer, hidden_states))
    conv, norm = mixer.conv1d, mixer.norm
    y = call(
        native_gdn.gdn_layer, mixed, a, b, z, window, state, arrivals(layer, mixer.num_k_heads, state), conv.weight.squeeze(1), conv.bias,
        mixer.A_log, mixer.dt_bias, norm.weight, norm_eps=norm.variance_epsilon, norm_activation=norm.activation, state_layout="kv",
    )  # fmt: skip
    out: Tensor = mixer.out_proj(y.unsqueeze(1))
    return out


def kimi_delta_attention(
    project: Callable[[Any, Tensor], tuple[Tensor, Tensor]], bound_of: Callable[[Any], float | None], mixer: Any, hidden_states: Tensor,
    cache: Any,
) -> Tensor:  # fmt: skip
    """hidden_states [batch, 1, hidden] of KimiLinearDeltaAttention and its kin; project: makes the gates; bound_of: their lower bound."""
    layer = cache.layers[mixer.layer_idx]
    window, state = layer.conv_states[0], layer.recurrent_states[0]
    mixed = projections.qkv(mixer, hidden_states)
    gate, z = project(mixer, hidden_states)
    conv, forget, norm = mixer.conv1d, mixer.forget_gate, mixer.o_norm
    y = call(
        native_gdn.kda_layer, mixed.squeeze(1), gate.squeeze(1), mixer.b_proj(hidden_states).squeeze(1), z.squeeze(1), window, state,
        arrivals(layer, mixer.num_heads, state), conv.weight.squeeze(1), conv.bias, forget.A_log.flatten(), forget.dt_bias, norm.weight,
        lower_bound=bound_of(forget), norm_eps=norm.variance_epsilon, norm_activation=norm.activation, state_layout="kv",
    )  # fmt: skip
    out: Tensor = mixer.o_proj(y.unsqueeze(1))
    return out


class Layer(NamedTuple):
    """How ssmgen computes a kind of mixer."""

    functions: tuple[str, str]  # that the mixer's own forward calls, at a decode step and over a prompt
    prompt: prompts.Layer
    step: Callable[[Any, Tensor, Any], Tensor] | None = None  # None: steps stay several calls
    masked: bool = False  # a step without padding has a mask too, [batch, 1]


_MAMBA = Layer(("mamba_selective_state_update", "mamba_selective_scan"), prompts.mamba)


def _mamba2(project: Any) -> Layer:
    functions = ("mamba2_selective_state_update", "mamba2_chunk_scan")
    return Layer(functions, partial(prompts.mamba2, project), partial(mamba2, project))


def _delta_net(project: Any) -> Layer:
    functions = ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule")
    return Layer(functions, partial(prompts.gated_delta_net, project), partial(gated_delta_net, project))


def _kimi(project: Any, bound_of: Any, masked: bool = False) -> Layer:
    functions = ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention")
    prompt = partial(prompts.kimi_delta_attention, project, bound_of)
    return Layer(functions, prompt, partial(kimi_delta_attention, project, bound_of), masked)


TABLE: dict[str, tuple[str, Layer]] = {
    "MambaMixer": ("mamba", _MAMBA),
    "FalconMambaMixer": ("falcon_mamba", _MAMBA),
    "JambaMambaMixer": ("jamba", _MAMBA),
    "Mamba2Mixer": ("mamba2", _mamba2(projections.in_proj)),
    "BambaMixer": ("bamba", _mamba2(projections.in_proj)),
    "FalconH1Mixer": ("falcon_h1", _mamba2(projections.falcon_h1)),
    "GraniteMoeHybridMambaLayer": ("granitemoehybrid", _mamba2(projections.in_proj)),
    "NemotronHMamba2Mixer": ("nemotron_h", _mamba2(projections.in_proj)),
    "Zamba2MambaMixer": ("zamba2", _mamba2(projections.in_proj)),
    "Qwen3NextGatedDeltaNet": ("qwen3_next", _delta_net(projections.qwen3_next)),
    "Qwen3_5GatedDeltaNet": ("qwen3_5", _delta_net(projections.qwen3_5)),
    "Qwen3_5MoeGatedDeltaNet": ("qwen3_5_moe", _delta_net(projections.qwen3_5)),
    "KimiLinearDeltaAttention": ("kimi_linear", _kimi(projections.kimi, projections.no_bound)),
    "Glm5NextTextLinearAttention": ("glm5_next", _kimi(projections.kimi, projections.glm_bound, masked=True)),
    "BailingHybridDeltaAttention": ("bailing_hybrid", _kimi(projections.bailing, projections.bailing_bound)),
}
"""{class of a mixer: (its model, how it is computed)}. A mixer's products, gates and multipliers are written out in its forward and behind
no name that could be looked for: these forwards have been read. `hf_copies` finds classes with the same ones. All have a row, copies of
each other too, so that a row whose class has changed can be reported."""


def run(layer: Layer, replacement: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a mixer's forward.

    A prompt that ssmgen's calls refuse goes to the original forward. Its functions are replaced as well and give the reason.
    """
    roles = Roles(original, "hidden_states", "cache", "attention_mask")
    refused: WeakSet[torch.nn.Module] = WeakSet()  # mixers that are not asked again: their projections would be computed twice
    unread: WeakSet[torch.nn.Module] = WeakSet()  # the same, of prompts

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden_states, cache, mask, others = roles(args, kwargs)
        if roles.unknown(others):
            return original(self, *args, **kwargs)
        masks = layer.masked and mask is not None and mask.shape == hidden_states.shape[:2]
        if layer.step is not None and is_step(self, hidden_states, cache, None if masks else mask):
            if not is_compiling() and self in refused:
                replacement.kept += 1
            else:
                given = (hidden_states * mask[:, :, None]).to(hidden_states.dtype) if masks else hidden_states
                result, reason = attempt(replacement, layer.step, self, given, cache)
                if reason is None:
                    return result
                refused.add(self)
                replacement.keep(reason)
        elif prompts.is_prompt(self, hidden_states, cache, mask, others) and self not in unread:
            result, reason = attempt(replacement, prompts.run, layer.prompt, self, hidden_states, cache, mask)
            if reason is None:
                return result
            unread.add(self)
        return original(self, *args, **kwargs)

    return run
