"""What the prompts of Mamba-2 models ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...models import Ask, Model, Role, Wanted
from ...spec import Index
from ..selective_state_update.models import Mamba
from .spec import OPERATOR, ScanProblem


class ScanAsk(Ask):
    """Batches that leave their final states, and packed sequences with a pool of states. Neither tokens nor heads are among it."""

    operator = OPERATOR
    role = Role.SCAN
    options = frozenset(("pools", "tokens"))

    def used_by(self, model: Model) -> bool:
        return model.kind == "mamba2"

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} is no Mamba-2, and {asked} is for that"

    def problems(self, model: Model, wanted: Wanted) -> Sequence[ScanProblem]:
        if not isinstance(model, Mamba):
            return []
        same: dict[str, Any] = {
            "headdim": model.headdim, "d_state": model.d_state, "x": wanted.io, "dt": wanted.io, "D": wanted.io, "dt_bias": wanted.io,
            "z": model.gate,
        }  # fmt: skip
        pool: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True}
        kinds = [{"final": True} if index is Index.NONE else pool | {"index": index} for index in wanted.indices]
        return [ScanProblem(**same, **kind, state=state) for state in wanted.states or (model.state,) for kind in kinds]

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return batch * model.nheads


ASKS = {OPERATOR: ScanAsk()}
