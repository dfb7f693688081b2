"""Trials of gdn_layer and kda_layer: operands from a spec alone, and what becomes of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...calls.planning import Caller
from ...engine.layer_trial import Maker, layer_trial, lead_of
from ...engine.trial import Trial
from ...spec import Index, Loads
from ..linear_attention.problem import Beta, Gate, Layout, Update
from ..linear_attention.trial import LOWER_BOUND
from . import gdn_call, gdn_tokens_call, kda_call, kda_tokens_call
from .gdn_spec import GdnLayerSpec
from .gdn_tokens_spec import GdnLayerTokensSpec
from .kda_spec import KdaLayerSpec
from .kda_tokens_spec import KdaLayerTokensSpec
from .planning import Options
from .spec import DeltaLayerSpec
from .tokens_spec import DeltaLayerTokensSpec


def operands(spec: DeltaLayerSpec | DeltaLayerTokensSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """By name: z and out with heads, g and dt_bias with heads and channels."""
    make = Maker(seed)
    HV, HK, V, K = spec.nheads, spec.key_heads, spec.dim_v, spec.dim_k
    slots, lead, channels = batch if spec.index is Index.NONE else 3 * batch, lead_of(spec, batch), 2 * HK * K + HV * V
    odd = spec.norm_loads is Loads.ELEMENT
    held = (HV, V, K) if spec.layout is Layout.VK else (HV, K, V)
    apart = spec.operand_loads is Loads.ELEMENT
    if spec.gk:
        gates = {"g": make.randn(spec.gk, *lead, HV, K, odd=apart), "beta": make.randn(spec.beta, *lead, HV)}
    else:
        gates = {"a": make.randn(spec.g, *lead, HV), "b": make.randn(spec.beta, *lead, HV)}
    several: dict[str, Any] = {}
    if isinstance(spec, DeltaLayerTokensSpec):
        slots, several = make.several(spec, slots, batch, spec.state if spec.intermediates else None, held, channels)
    made: dict[str, Any] = {
        "state": make.state(spec.state, slots, held, spec.state_loads is Loads.ELEMENT),
        **make.convolution(spec, slots, batch, channels),
        **gates,
        "A_log": spec.A_log and make.randn(spec.A_log, HV),
        "dt_bias": spec.dt_bias and make.randn(spec.dt_bias, HV, *([K] if spec.gk else []), odd=apart),
        "z": make.randn(spec.norm_gate, *lead, HV, V, odd=odd) if spec.norm else None,
        "norm_weight": spec.norm and make.randn(spec.norm, V),
        "out": make.randn(spec.out, *lead, HV, V, odd=odd).fill_(float("nan")),
        "arrivals": torch.zeros(slots, HK, dtype=torch.int32),
        **(several if "state_indices" in several else several | make.slots(spec.index, slots, batch)),
    }
    return {name: t for name, t in made.items() if t is not None}


def delta_layer(caller: Caller, spec: DeltaLayerSpec | DeltaLayerTokensSpec, batch: int, seed: int) -> Trial:
    twice, scale = spec.beta_form is Beta.TWICE_SIGMOID, spec.dim_k**-0.5
    norm = (1e-6, spec.norm_first, spec.norm_activation.value)
    bound = LOWER_BOUND if spec.gate is Gate.BOUNDED else None
    options = Options(*norm, twice, spec.l2norm, scale, spec.layout.value, -1, spec.update is not Update.NONE, bound)
    return layer_trial(caller, spec, operands(spec, batch, seed), options)


TRIALS = {
    GdnLayerSpec: partial(delta_layer, gdn_call.CALLER),
    GdnLayerTokensSpec: partial(delta_layer, gdn_tokens_call.CALLER),
    KdaLayerSpec: partial(delta_layer, kda_call.CALLER),
    KdaLayerTokensSpec: partial(delta_layer, kda_tokens_call.CALLER),
}
