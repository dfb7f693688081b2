"""Trials of gdn_layer and kda_layer: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engine.layers.trial import Maker, layer_trial, lead_of
from ...engine.recurrences.attention.problem import Beta, Gate
from ...engine.trial import Trial
from ...spec.kernel import Index, Layout, Loads, Update
from .planning import CALLERS, Options
from .spec import DeltaLayerSpec

LOWER_BOUND = -5.0  # for bounded log decays


def operands(spec: DeltaLayerSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Operands by name: z and out with heads, g and dt_bias with heads and channels."""
    make = Maker(seed)
    HV, HK, V, K = spec.nheads, spec.key_heads, spec.dim_v, spec.dim_k
    slots, lead, channels = batch if spec.index is Index.NONE else 3 * batch, lead_of(spec, batch), 2 * HK * K + HV * V
    odd = spec.norm.loads is Loads.ELEMENT
    held = (HV, V, K) if spec.layout is Layout.VK else (HV, K, V)
    assert spec.beta is not None, "a delta rule has one"
    apart = spec.operand_loads is Loads.ELEMENT
    if spec.gk is not None:
        gates = {"g": make.randn(spec.gk, *lead, HV, K, odd=apart), "beta": make.randn(spec.beta, *lead, HV)}
    else:
        assert spec.g is not None, "without a decay per channel it has one per head"
        gates = {"a": make.randn(spec.g, *lead, HV), "b": make.randn(spec.beta, *lead, HV)}
    several: dict[str, Any] = {}
    if spec.several:
        slots, several = make.several(spec, slots, batch, spec.state if spec.intermediates else None, held, channels)
    made: dict[str, Any] = {
        "state": make.state(spec.state, slots, held, spec.state_loads is Loads.ELEMENT),
        **make.convolution(spec, slots, batch, channels),
        **gates,
        "A_log": spec.A_log and make.randn(spec.A_log, HV),
        "dt_bias": spec.dt_bias and make.randn(spec.dt_bias, HV, *([K] if spec.gk else []), odd=apart),
        "z": make.randn(spec.norm.gate, *lead, HV, V, odd=odd) if spec.norm.weight else None,
        "norm_weight": spec.norm.weight and make.randn(spec.norm.weight, V),
        "out": make.randn(spec.out, *lead, HV, V, odd=odd).fill_(float("nan")),
        "arrivals": torch.zeros(slots, HK, dtype=torch.int32),
        **(several if "state_indices" in several else several | make.slots(spec.index, slots, batch)),
    }
    if spec.philox_rounds:
        made["rand_seed"] = torch.randint(-(2**62), 2**62, (slots,), generator=make.generator)
    return {name: t for name, t in made.items() if t is not None}


def delta_layer(spec: DeltaLayerSpec, batch: int, seed: int) -> Trial:
    twice, scale = spec.beta_form is Beta.TWICE_SIGMOID, spec.dim_k**-0.5
    norm = (1e-6, spec.norm.first, spec.norm.activation.value)
    bound = LOWER_BOUND if spec.gate is Gate.BOUNDED else None
    options = Options(*norm, twice, spec.l2norm, scale, spec.layout.value, -1, spec.update is not Update.NONE, bound, spec.philox_rounds)
    return layer_trial(CALLERS[spec.function], spec, operands(spec, batch, seed), options)


TRIALS = {DeltaLayerSpec: delta_layer}
