"""What the prompts of Mamba-1 models ask for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...engine.recurrences.mamba.model import MambaModel
from ...select.models import Ask, Client, Model, Role, Wanted
from ...spec.kernel import DType, Index
from .problem import OPERATOR, Order, SelectiveProblem, asked

# What lies contiguous: mamba-ssm has tokens, of B and C too, transformers states of those; serving engines have views whose channels are.
TOKENS: dict[str, Any] = {"layout": Order.FIRST, "key_layout": Order.FIRST}
BATCHES: tuple[dict[str, Any], ...] = (TOKENS | {"final": True}, {"layout": Order.FIRST, "final": True}, {"final": True})
POOL: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True}


class SelectiveAsk(Ask):
    """The prompts of Mamba-1 models; neither tokens nor channels are among what is asked.

    Without slots, batches in all three layouts, from zeros; with slots, packed sequences, whose channels are contiguous, of a pool that
    says itself which of them go on. Where channels are few, also for prompts that are long enough to be cut. Built when a call asks for
    them: other states, and rows that begin at odd places.
    """

    operator = OPERATOR
    role = Role.SCAN
    options = frozenset(("pools", "tokens"))

    def used_by(self, model: Model) -> bool:
        return model.kind == "mamba1"

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} is no Mamba-1, and {asked} is for those"

    def problems(self, model: Model, wanted: Wanted) -> Sequence[SelectiveProblem]:
        if not isinstance(model, MambaModel) or not self.used_by(model):
            return []
        same: dict[str, Any] = {"d_state": model.d_state, "x": wanted.io, "D": DType.F32, "z": True, "delta_bias": DType.F32}
        batches = BATCHES
        if wanted.caller is Client.MAMBA_SSM:
            batches = BATCHES[:1]
        elif wanted.caller is Client.TRANSFORMERS:  # its functions pass weights in f32, whole layers in the dtype of activations
            batches = tuple(BATCHES[-1] | {"D": dtype, "delta_bias": dtype} for dtype in (DType.F32, wanted.io))
        kinds = [kind for index in wanted.indices for kind in (batches if index is Index.NONE else [POOL | {"index": index}])]
        found = [SelectiveProblem(**same | kind, state=s) for s in wanted.states or (model.state,) for kind in kinds]
        few: dict[str, Any] = asked(None, model.headdim, model.d_state, sys.maxsize)
        return list(dict.fromkeys(found + [replace(problem, **few) for problem in found if few]))  # and of prompts that are cut

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return batch * (model.headdim if isinstance(model, MambaModel) else 0)


ASKS = {OPERATOR: SelectiveAsk()}
