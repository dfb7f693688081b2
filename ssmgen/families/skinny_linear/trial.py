"""Trials of skinny_linear: operands from a spec alone, and the call that takes them."""

from __future__ import annotations

import torch

from ...calls.checks import STORED_DTYPES
from ...engine.trial import Trial, fill, ordered, trial, wide
from ...spec.kernel import Loads
from .call import CALLER, GATED, RELU2, Options
from .spec import FmaSpec, SkinnyKernel, SkinnySpec


def skinny_linear(spec: SkinnyKernel, batch: int, seed: int) -> Trial:
    """Weights with gaps between their rows, and one more tile than blocks of a few multiprocessors have at once, half of it missing."""
    g = torch.Generator().manual_seed(seed)
    rows, odd = min(batch, spec.rows), spec.loads is Loads.ELEMENT
    made = {"x": wide(torch.randn(rows, spec.k, generator=g), spec.x, odd)}
    if spec.norm:
        made["norm_weight"] = wide(1 + torch.randn(spec.k, generator=g) / 4, spec.norm, False)
    for i, weight in enumerate(spec.names("weight")):
        n = 48 * getattr(spec, "tiles", 1) + 8 if i == 0 or spec.gated else 24 * i
        if spec.narrow and spec.scale:
            gap = torch.zeros(n, spec.k + 16, dtype=STORED_DTYPES[spec.narrow])
            made[weight] = fill(gap[:, : spec.k], g)
            scale = (torch.rand(n, generator=g) + 0.5) * (3 / spec.narrow.largest * spec.k**-0.5)
            made[weight.replace("weight", "scale")] = wide(scale, spec.scale, True)
        else:
            made[weight] = wide(torch.randn(n, spec.k, generator=g) * spec.k**-0.5, spec.x, False)
            if spec.scale:
                made[weight.replace("weight", "scale")] = wide(torch.rand(n, generator=g) + 0.5, spec.scale, True)
        if spec.bias:
            made[weight.replace("weight", "bias")] = wide(torch.randn(n, generator=g), spec.bias, True)
        if spec.residual:
            made[weight.replace("weight", "residual")] = wide(torch.randn(rows, n, generator=g), spec.residual, True)
        made[weight.replace("weight", "out")] = wide(torch.full((rows, n), float("nan")), spec.out, True)
    return trial(CALLER, ordered(spec, made), Options(GATED if spec.gated else RELU2 if spec.relu2 else None))


TRIALS = {SkinnySpec: skinny_linear, FmaSpec: skinny_linear}
