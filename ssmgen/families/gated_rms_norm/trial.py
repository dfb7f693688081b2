"""Trials of gated_rms_norm: operands from a spec alone, and what becomes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.trial import Trial, trial, wide
from ...spec import Loads
from .call import CALLER, Options
from .spec import NormSpec


def operands(spec: NormSpec, batch: int, seed: int) -> dict[str, Tensor]:
    """Groups with gaps between them, three in a row if they may be several; each has a weight of its own then."""
    g = torch.Generator().manual_seed(seed)
    groups, odd = 3 if spec.grouped else 1, spec.loads is Loads.ELEMENT
    shape = {"weight": (groups, spec.size)}
    made = {}
    for role in spec.roles():
        values = torch.randn(shape.get(role, (batch, groups, spec.size)), generator=g)
        made[role] = wide(values, getattr(spec, role), odd)
    made["out"].fill_(float("nan"))
    return made


def gated_rms_norm(spec: NormSpec, batch: int, seed: int) -> Trial:
    return trial(CALLER, operands(spec, batch, seed), Options(1e-5, spec.norm_first, spec.activation.value))


TRIALS = {NormSpec: gated_rms_norm}
