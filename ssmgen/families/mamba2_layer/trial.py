"""Trials of mamba2_layer: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...calls.checks import TORCH_DTYPES
from ...engine.layers.trial import Maker, layer_trial, lead_of
from ...engine.trial import Trial
from ...spec.kernel import Index, Loads
from .planning import CALLER, Options
from .spec import Mamba2LayerSpec

LIMIT = (0.01, 0.1)  # of dt: in the middle of the range of softplus


def operands(spec: Mamba2LayerSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """The operands that the spec has, by name."""
    make = Maker(seed)
    H, P, N, G = spec.nheads, spec.headdim, spec.d_state, spec.ngroups
    slots, inner, lead = batch if spec.index is Index.NONE else 3 * batch, spec.nheads * spec.headdim, lead_of(spec, batch)
    channels, odd = inner + 2 * G * N, spec.norm.loads is Loads.ELEMENT
    gate = spec.norm.gate if spec.norm.weight else spec.z
    several: dict[str, Any] = {}
    if spec.several:
        slots, several = make.several(spec, slots, batch, spec.intermediate_states, (H, P, N), channels)
    made: dict[str, Any] = {
        "state": make.state(spec.state, slots, (H, P, N), spec.state_loads is Loads.ELEMENT),
        **make.convolution(spec, slots, batch, channels),
        "dt": make.randn(spec.dt, *lead, H),
        "A": -(torch.rand(H, generator=make.generator) + 0.1).to(TORCH_DTYPES[spec.A]),
        "D": spec.D and make.randn(spec.D, H),
        "z": gate and make.randn(gate, *lead, inner, odd=odd),
        "dt_bias": spec.dt_bias and make.randn(spec.dt_bias, H),
        "norm_weight": spec.norm.weight and make.randn(spec.norm.weight, inner),
        "out": torch.full((*lead, inner + (1 if odd else 8)), float("nan"), dtype=TORCH_DTYPES[spec.out])[..., :inner],
        "arrivals": torch.zeros(slots, G, dtype=torch.int32),
        **(several if "state_indices" in several else several | make.slots(spec.index, slots, batch)),
    }
    if spec.philox_rounds:
        made["rand_seed"] = torch.randint(-(2**62), 2**62, (slots,), generator=make.generator)
    return {name: t for name, t in made.items() if t is not None}


def mamba2_layer(spec: Mamba2LayerSpec, batch: int, seed: int) -> Trial:
    limit = LIMIT if spec.dt_limit else None
    norm = (1e-5, spec.norm.size or None, spec.norm.first)
    options = Options(*norm, spec.dt_softplus, limit, spec.A_is_log, -1, spec.philox_rounds, spec.conv_moves)
    return layer_trial(CALLER, spec, operands(spec, batch, seed), options, options._replace(philox_rounds=0))


TRIALS = {Mamba2LayerSpec: mamba2_layer}
