"""Trials of token_shift: operands from a spec alone, and their expected results."""

from __future__ import annotations

import torch

from ...engine.trial import Trial, ordered, slot_indices, trial, wide
from ...spec.kernel import Index, Loads
from .call import CALLER, Options
from .spec import TokenShiftSpec


def token_shift(spec: TokenShiftSpec, batch: int, seed: int) -> Trial:
    """The second row is padding, if there are slots."""
    g = torch.Generator().manual_seed(seed)
    slots, odd = batch if spec.index is Index.NONE else 3 * batch, spec.loads is Loads.ELEMENT
    rows = {"state": slots, "x": batch, "out": batch}
    made = {name: wide(torch.randn(count, spec.dim, generator=g), spec.x, odd) for name, count in rows.items()}
    made["out"].fill_(float("nan"))
    made["mix"] = wide(torch.rand(spec.dim, generator=g), spec.mix, odd)
    if spec.index is not Index.NONE:
        made["state_indices"] = slot_indices(spec.index, batch, slots, g)
    return trial(CALLER, ordered(spec, made), Options(), exact=("state",))


TRIALS = {TokenShiftSpec: token_shift}
