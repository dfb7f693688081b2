"""Trials of mamba3_state_update: operands from a spec alone, and their expected results."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...engine.trial import Trial, ordered, slots_of, states, trial, wide
from ...spec.kernel import DType, Loads
from .planning import CALLER, Options
from .spec import Mamba3Spec

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

    def laid(values: Tensor, dtype: DType, inner: int, step: int = 1) -> Tensor:
        """The last `inner` axes are dense, with gaps between; or if kernels take all strides, rows begin at odd places, with this step."""
        if odd:
            return wide(values, dtype, True, step)
        lead = values.shape[: values.dim() - inner]
        rows = wide(values.reshape(*lead, -1), dtype, False)
        return rows.view(values.shape)

    made["state"] = states(spec.state, (slots,), (H, P, N), 1 if spec.state_loads is Loads.ELEMENT else 16).copy_(randn(slots, H, P, N))
    made["k_state"] = laid(randn(slots, R, H, N), spec.k_state, 3)
    made["v_state"] = laid(randn(slots, H, P), spec.v_state, 2)
    made["angle"] = made["angle_state"] = torch.empty(0)
    if spec.angle is not None:
        made["angle_state"] = laid(math.pi * (2 * torch.rand(slots, H, spec.angles, generator=g) - 1), DType.F32, 2)
        made["angle_state"][0] += 400 * math.pi  # read from a cache that does not wrap
        made["angle"] = laid(randn(*lead, spec.angles), spec.angle, 1).unsqueeze(-2).expand(*lead, H, spec.angles)
    made |= {name: laid(randn(*lead, R, G, N), spec.B, 3, 2) for name in ("B", "C")}
    made |= {name: laid(randn(*lead, H, P), getattr(spec, name), 2, 2) for name in ("x", "z") if getattr(spec, name)}
    made["out"] = laid(torch.full((*lead, R if spec.by_rank else 1, H, P), math.nan), spec.out, 3)
    decay = -torch.rand(*lead, H, generator=g) - 0.1 if not spec.rate.raw else randn(*lead, H)
    made["A"] = laid(decay, spec.A, 1)
    made["dt"] = laid(randn(*lead, H) if spec.dt_softplus else torch.rand(*lead, H, generator=g), spec.dt, 1)
    made["trap"] = laid(randn(*lead, H) if spec.trap_sigmoid else torch.rand(*lead, H, generator=g), spec.trap, 1)
    made |= {name: laid(randn(H), getattr(spec, name), 1) for name in ("D", "dt_bias") if getattr(spec, name)}
    made |= {name: wide(1 + randn(N) / 4, spec.row_norm, odd) for name in ("B_norm", "C_norm") if spec.row_norm}
    made |= {name: laid(1 + randn(H, R, N), spec.row_bias, 3) for name in ("B_bias", "C_bias") if spec.row_bias}
    made |= {name: laid(randn(H, R, P), spec.mimo, 3) for name in ("mimo_x", "mimo_z", "mimo_o") if spec.mimo}
    if spec.norm_weight:
        made["norm_weight"] = laid(1 + randn(H, P) / 4, spec.norm_weight, 2)
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
