"""Trials of mamba3_state_update: operands from a spec alone, and their expected results."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...engine.trial import Trial, ordered, slots_of, states, trial, wide
from ...spec.kernel import Loads
from .planning import CALLER
from .spec import Mamba3Spec
from .views import Options

TOKENS = 3  # of a call of several


def mamba3_state_update(spec: Mamba3Spec, batch: int, seed: int) -> Trial:
    g = torch.Generator().manual_seed(seed)
    H, P, N, G, R = spec.nheads, spec.headdim, spec.d_state, spec.ngroups, spec.rank
    lead = (batch, TOKENS) if spec.several else (batch,)
    odd = spec.operand_loads is Loads.ELEMENT
    targets = TOKENS if spec.each else 0
    slots, made = slots_of(spec.index, spec.accepted, [TOKENS] * batch, g, in_place=not spec.split, split=spec.split, targets=targets)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    made["state"] = states(spec.state, (slots,), (H, P, N), 1 if spec.state_loads is Loads.ELEMENT else 16).copy_(randn(slots, H, P, N))
    made["k_state"] = wide(randn(slots, R, H, N), spec.k_state, odd)
    made["v_state"] = wide(randn(slots, H, P), spec.v_state, True)
    made["angle"] = made["angle_state"] = torch.empty(0)
    if spec.angle is not None:
        made["angle_state"] = torch.nn.functional.pad(math.pi * (2 * torch.rand(slots, H, spec.angles, generator=g) - 1), (0, 3))[..., :-3]
        made["angle_state"][0] += 400 * math.pi  # read from a cache that does not wrap
        made["angle"] = wide(randn(*lead, spec.angles), spec.angle, True).unsqueeze(-2).expand(*lead, H, spec.angles)
    made |= {name: wide(randn(*lead, R, G, N), spec.B, odd, 2 if odd else 1) for name in ("B", "C")}
    made |= {name: wide(randn(*lead, H, P), getattr(spec, name), True, 2) for name in ("x", "z") if getattr(spec, name)}
    made["out"] = wide(torch.full((*lead, R if spec.by_rank else 1, H, P), math.nan), spec.out, True)
    decay = -torch.rand(*lead, H, generator=g) - 0.1 if not spec.rate.raw else randn(*lead, H)
    made["A"] = wide(decay, spec.A, True)
    made["dt"] = wide(randn(*lead, H) if spec.dt_softplus else torch.rand(*lead, H, generator=g), spec.dt, True)
    made["trap"] = wide(randn(*lead, H) if spec.trap_sigmoid else torch.rand(*lead, H, generator=g), spec.trap, True)
    made |= {name: wide(randn(H), getattr(spec, name), True) for name in ("D", "dt_bias") if getattr(spec, name)}
    made |= {name: wide(1 + randn(N) / 4, spec.row_norm, odd) for name in ("B_norm", "C_norm") if spec.row_norm}
    made |= {name: wide(1 + randn(H, R, N), spec.row_bias, odd) for name in ("B_bias", "C_bias") if spec.row_bias}
    made |= {name: wide(randn(H, R, P), spec.mimo, True) for name in ("mimo_x", "mimo_z", "mimo_o") if spec.mimo}
    if spec.norm_weight:
        made["norm_weight"] = wide(1 + randn(H, P) / 4, spec.norm_weight, True)
    if spec.philox_rounds:
        made["rand_seed"] = torch.randint(-(2**62), 2**62, (slots,), generator=g)
    named = ordered(spec, made)
    if not spec.by_rank:
        named["out"] = named["out"].squeeze(-3)
    options = Options(
        spec.rate.value,
        spec.rotary.value,
        spec.dt_softplus,
        spec.trap_sigmoid,
        philox_rounds=spec.philox_rounds,
        zero_padding=spec.zero_padding,
    )
    return trial(CALLER, named, options, without_noise=options._replace(philox_rounds=0), tokens=TOKENS if spec.several else 1)


TRIALS = {Mamba3Spec: mamba3_state_update}
