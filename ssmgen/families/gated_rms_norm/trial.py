"""Trials of gated_rms_norm: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.trial import TOLERANCE, Trial, trial, wide
from ...spec.kernel import Loads
from . import centred, plain
from .call import CALLER, Options
from .operands import OPERANDS, SHARED
from .spec import NormSpec


def operands(spec: NormSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Groups with gaps between them; three in a row, each with its own weight, if the spec allows several groups."""
    g = torch.Generator().manual_seed(seed)
    groups, odd = 3 if spec.grouped else 1, spec.loads is Loads.ELEMENT
    shape = dict.fromkeys(SHARED, (groups, spec.size))
    made = {}
    for role in spec.roles():
        values = torch.randn(shape.get(role, (batch, groups, spec.size)), generator=g)
        made[role] = wide(values, getattr(spec, "sum" if role == "residual_out" else role), odd)
    for role in OPERANDS.written:
        if role in made:
            made[role].fill_(float("nan"))
    return made


def norm(spec: NormSpec, batch: int, seed: int) -> Trial:
    """A trial of the public function that launches this kernel."""
    if spec.residual or spec.unit_offset or spec.rounded:
        slack = {"out": TOLERANCE[spec.out] + TOLERANCE[spec.sum or spec.out]}  # rounded before the weight, and before the norm
        options = plain.Options(1e-5, None, spec.unit_offset, spec.rounded)
        return trial(plain.CALLER, operands(spec, batch, seed), options, slack=slack)
    caller = centred.CALLER if spec.centred else CALLER
    return trial(caller, operands(spec, batch, seed), Options(1e-5, spec.norm_first, spec.activation.value))


TRIALS = {NormSpec: norm}
