"""The kernels that prompts of Mamba-1 models need."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...engine.recurrences.mamba.model import MambaModel
from ...select.models import Ask, Client, Model, Role, Wanted
from ...spec.kernel import DType, Index
from .problem import OPERATOR, Order, SelectiveProblem, asked

# Contiguous axes: tokens in mamba-ssm, also of B and C; in transformers states of B and C; channels in serving engines, which pass views.
TOKENS: dict[str, Any] = {"layout": Order.FIRST, "key_layout": Order.FIRST}
BATCHES: tuple[dict[str, Any], ...] = (TOKENS | {"final": True}, {"layout": Order.FIRST, "final": True}, {"final": True})
POOL: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True}


class SelectiveAsk(Ask):
    """The prompts of Mamba-1 models; the problems fix neither tokens nor channels.

    Without slots: batches in all three layouts, from zeros. With slots: packed sequences with contiguous channels and a pool, where a flag
    per sequence tells whether it continues. Prompts that are long enough to be cut, if channels are few. Other states, and rows that
    begin at odd offsets, are built when a call needs them.
    """

    operator = OPERATOR
    role = Role.SCAN
    options = frozenset(("pools", "tokens"))

    def used_by(self, model: Model) -> bool:
        return model.kind == "mamba1"

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} is not Mamba-1, which {asked} computes"

    def problems(self, model: Model, wanted: Wanted) -> Sequence[SelectiveProblem]:
        if not isinstance(model, MambaModel) or not self.used_by(model):
            return []
        same: dict[str, Any] = {"d_state": model.d_state, "x": wanted.io, "D": DType.F32, "z": True, "delta_bias": DType.F32}
        batches = BATCHES
        if wanted.caller is Client.MAMBA_SSM:
            batches = BATCHES[:1]
        elif wanted.caller is Client.TRANSFORMERS:  # its functions pass weights in f32, its layers in the dtype of activations
            batches = tuple(BATCHES[-1] | {"D": dtype, "delta_bias": dtype} for dtype in (DType.F32, wanted.io))
        kinds = [kind for index in wanted.indices for kind in (batches if index is Index.NONE else [POOL | {"index": index}])]
        found = [SelectiveProblem(**same | kind, state=s) for s in wanted.states or (model.state,) for kind in kinds]
        few: dict[str, Any] = asked(None, model.headdim, model.d_state, sys.maxsize)
        return list(dict.fromkeys(found + [replace(problem, **few) for problem in found if few]))  # and for prompts that are cut

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return batch * (model.headdim if isinstance(model, MambaModel) else 0)


ASKS = {OPERATOR: SelectiveAsk()}
