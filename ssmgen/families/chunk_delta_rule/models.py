"""What the prompts of models of gated delta rules ask for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ...models import Ask, Model, Role, Wanted
from ...spec import DType, Index
from ..linear_attention.models import LinearAttention
from .problem import OPERATOR, DeltaProblem, Gate

# Which states a call has. Batches leave theirs, behind a cache that has tokens also begin with it; packed sequences are those of `PACKED`.
BATCHES: tuple[dict[str, Any], ...] = ({"final": True}, {"initial": True, "final": True})
OWN_POOL: dict[str, Any] = {"pool": True, "started": True}
PACKED: tuple[dict[str, Any], ...] = (OWN_POOL, {"pool": True, "initial": True}, *BATCHES)
MARKED: dict[str, Any] = {"checkpoints": Index.I32, "initial": True}


class DeltaAsk(Ask):
    """The prompts of Gated DeltaNet models; neither tokens nor heads are among what is asked.

    Gates as transformers and the serving engines give them: log decays in f32, and betas of the activations' dtype, sigmoid and all; q and
    k not yet divided by their norms. Without slots, batches, new and behind a cache. With slots, packed sequences: of a pool that says
    itself which of them go on, into a pool from dense states, and of dense states alone; with `intermediates` also states after chunks.
    """

    operator = OPERATOR
    role = Role.SCAN
    options = frozenset(("pools", "tokens", "layout", "intermediates"))

    def used_by(self, model: Model) -> bool:
        return model.kind == "gated_delta_rule"

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} is no gated delta rule, and {asked} is for those"

    def takes(self, model: Model) -> Collection[str]:
        return self.options

    def problems(self, model: Model, wanted: Wanted) -> Sequence[DeltaProblem]:
        if not isinstance(model, LinearAttention):
            return []
        same: dict[str, Any] = {"head_k": model.dim_k, "head_v": model.dim_v, "x": wanted.io, "beta": wanted.io, "layout": wanted.layout}
        same |= {"gate": Gate.LOG, "g": DType.F32, "l2norm": True}
        packed = (*PACKED, MARKED) if wanted.intermediates and wanted.update_state else PACKED
        kinds = [kind for index in wanted.indices for kind in (BATCHES if index is Index.NONE else _by_slots(packed, index))]
        return list(dict.fromkeys(DeltaProblem(**same, **kind, state=s) for s in wanted.states or (model.state,) for kind in kinds))

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return model.nheads


def _by_slots(kinds: Sequence[dict[str, Any]], index: Index) -> list[dict[str, Any]]:
    return [kind | {"cu_seqlens": Index.I32, "index": index if kind.get("pool") else Index.NONE} for kind in kinds]


ASKS = {OPERATOR: DeltaAsk()}
