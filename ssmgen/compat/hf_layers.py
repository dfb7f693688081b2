"""Whole decode layers of transformers' models: what `patch(fuse=True)` puts in the place of a mixer's forward.

A decode step goes from the in-projection to the out-projection in one call of ssmgen's. All else, prompts and training among it, is the
original forward's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..ops import gdn_layer as native_gdn
from ..ops import mamba2_layer as native_mamba2
from ..ops.checks import DTYPES
from .hf_functions import Replacement, attempt, call

_ATTRIBUTE = "_ssmgen_arrivals"  # of a layer of transformers' cache, beside the states that it belongs to


class Prepared(NamedTuple):
    """What is made of a mixer's weights, once for each of their versions."""

    version: tuple[int, int]
    A: Tensor


_prepared: WeakKeyDictionary[torch.nn.Module, Prepared] = WeakKeyDictionary()


def _rates(mixer: Any) -> Tensor:
    """A [heads] of a Mamba-2 mixer, in f32."""
    weight = mixer.A_log
    if is_compiling():
        return -torch.exp(weight.float())
    version = (weight.data_ptr(), weight._version)
    known = _prepared.get(mixer)
    if known is None or known.version != version:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return -torch.exp(weight.float())  # a graph's own memory, which nothing else may keep
        with torch.no_grad():
            known = _prepared[mixer] = Prepared(version, -torch.exp(weight.float()))
    return known.A


def _arrivals(layer: Any, slots: int, groups: int, like: Tensor) -> Tensor:
    """[slots, groups] zeros that stay with a layer of the cache; in compiled and captured code new ones in each step."""
    if is_compiling() or (like.is_cuda and torch.cuda.is_current_stream_capturing() and not hasattr(layer, _ATTRIBUTE)):
        return like.new_zeros(slots, groups, dtype=torch.int32)
    found = getattr(layer, _ATTRIBUTE, None)
    if found is None or found.shape != (slots, groups) or found.device != like.device:
        found = like.new_zeros(slots, groups, dtype=torch.int32)
        setattr(layer, _ATTRIBUTE, found)
    return found


def is_step(mixer: Any, hidden_states: Tensor, cache_params: Any, attention_mask: Tensor | None) -> bool:
    """Whether a forward is a decode step that may be fused."""
    if cache_params is None or attention_mask is not None or hidden_states.shape[1] != 1 or torch.is_grad_enabled():
        return False
    if hasattr(mixer.conv1d, "_hf_hook") or mixer.activation not in ("silu", "swish"):  # accelerate brings the weight when conv1d is called
        return False
    if is_compiling() and hidden_states.dtype not in DTYPES:
        return False
    layer = cache_params.layers[mixer.layer_idx]
    return cache_params.has_previous_state(mixer.layer_idx, state_idx=0) and not getattr(layer, "record_past", False)


def mamba2(mixer: Any, hidden_states: Tensor, cache_params: Any) -> Tensor:
    """hidden_states [batch, 1, hidden] of Mamba2Mixer and its kin."""
    layer = cache_params.layers[mixer.layer_idx]
    window, state = layer.conv_states[0], layer.recurrent_states[0]
    scale, multipliers = getattr(mixer, "ssm_in_multiplier", None), getattr(mixer, "mup_vector", None)  # of Falcon-H1
    projected = mixer.in_proj(hidden_states if scale is None else hidden_states * scale)
    projected = (projected if multipliers is None else projected * multipliers).squeeze(1)
    inner, heads = mixer.num_heads * mixer.head_dim, mixer.num_heads
    z, xBC, dt = projected.split([inner, projected.shape[1] - inner - heads, heads], dim=1)
    norm = mixer.norm if getattr(mixer, "mamba_rms_norm", True) else None
    y = call(
        native_mamba2.mamba2_layer, xBC, dt, z, window, state, _arrivals(layer, state.shape[0], mixer.n_groups, state),
        mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, _rates(mixer), mixer.D, mixer.dt_bias, None if norm is None else norm.weight,
        norm_eps=0.0 if norm is None else norm.variance_epsilon, norm_group_size=None if norm is None else _group_size(norm, inner),
        norm_before_gate=bool(getattr(norm, "norm_before_gate", False)),
    )  # fmt: skip
    return mixer.out_proj(y.unsqueeze(1))


def _group_size(norm: Any, channels: int) -> int:
    """Channels that a gated norm takes together."""
    return getattr(norm, "group_size", None) or channels // getattr(norm, "n_groups", 1)


def _qwen3_next(mixer: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """(mixed q, k and v; z; b; a)"""
    query, key, value, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(hidden_states), mixer.in_proj_ba(hidden_states))
    mixed = torch.cat([t.flatten(2) for t in (query, key, value)], dim=-1)
    return mixed.squeeze(1), z.flatten(1), b.squeeze(1), a.squeeze(1)


def _qwen3_5(mixer: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """(mixed q, k and v; z; b; a)"""
    projections = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
    return tuple(projection(hidden_states).squeeze(1) for projection in projections)


def gated_delta_net(project: Callable[[Any, Tensor], tuple[Tensor, ...]], mixer: Any, hidden_states: Tensor, cache_params: Any) -> Tensor:
    """hidden_states [batch, 1, hidden] of Qwen3NextGatedDeltaNet and its kin; project: the in-projections."""
    layer = cache_params.layers[mixer.layer_idx]
    window, state = layer.conv_states[0], layer.recurrent_states[0]
    mixed, z, b, a = project(mixer, hidden_states)
    y = call(
        native_gdn.gdn_layer, mixed, a, b, z, window, state, _arrivals(layer, state.shape[0], mixer.num_k_heads, state),
        mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, mixer.A_log, mixer.dt_bias, mixer.norm.weight,
        norm_eps=mixer.norm.variance_epsilon, state_layout="kv",
    )  # fmt: skip
    return mixer.out_proj(y.unsqueeze(1))


class Fused(NamedTuple):
    """A class of a modeling file, and its decode step."""

    name: str
    step: Callable[[Any, Tensor, Any], Tensor]


def _gdn(name: str, project: Callable[[Any, Tensor], tuple[Tensor, ...]]) -> Fused:
    return Fused(name, lambda mixer, hidden_states, cache_params: gated_delta_net(project, mixer, hidden_states, cache_params))


LAYERS: dict[str, Fused] = {
    "mamba2": Fused("Mamba2Mixer", mamba2),
    "bamba": Fused("BambaMixer", mamba2),
    "falcon_h1": Fused("FalconH1Mixer", mamba2),
    "granitemoehybrid": Fused("GraniteMoeHybridMambaLayer", mamba2),
    "nemotron_h": Fused("NemotronHMamba2Mixer", mamba2),
    "zamba2": Fused("Zamba2MambaMixer", mamba2),
    "qwen3_next": _gdn("Qwen3NextGatedDeltaNet", _qwen3_next),
    "qwen3_5": _gdn("Qwen3_5GatedDeltaNet", _qwen3_5),
    "qwen3_5_moe": _gdn("Qwen3_5MoeGatedDeltaNet", _qwen3_5),
}
"""Mixers by the name of transformers' model folder."""


def objection(mixer: type) -> str:
    """What keeps a mixer's forward from being replaced, or nothing."""
    found = list(inspect.signature(mixer.forward).parameters)
    expected = ["self", "hidden_states", "cache_params", "attention_mask"]
    return "" if found[:4] == expected else f"its forward takes {', '.join(found)}, not {', '.join(expected)}"


def run_layer(replacement: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a mixer's forward."""
    step = next(fused.step for fused in LAYERS.values() if fused.name == replacement.module.__name__)
    refused: WeakSet[torch.nn.Module] = WeakSet()  # mixers that are not asked again: their projections would be computed twice

    def run(self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if is_step(self, hidden_states, cache_params, attention_mask) and (is_compiling() or self not in refused):
            result, reason = attempt(replacement, step, self, hidden_states, cache_params)
            if reason is None:
                return result
            refused.add(self)
            replacement.keep(reason)
        return original(self, hidden_states, cache_params, attention_mask, **kwargs)

    return run
