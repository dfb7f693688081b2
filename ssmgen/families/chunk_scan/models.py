"""What the prompts of Mamba-2 and Lightning attention models ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...models import Ask, Model, Role, Wanted
from ...spec import DType, Index
from ..linear_attention.models import LinearAttention
from ..selective_state_update.models import Mamba
from .spec import OPERATOR, WITHOUT_DT, Gate, ScanProblem


class ScanAsk(Ask):
    """Batches that leave their final states, and packed sequences with a pool of states. Neither tokens nor heads are among it."""

    operator = OPERATOR
    role = Role.SCAN
    options = frozenset(("pools", "tokens"))

    def used_by(self, model: Model) -> bool:
        return model.kind in ("mamba2", "lightning_attn")

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} is neither a Mamba-2 nor Lightning attention, and {asked} is for those"

    def problems(self, model: Model, wanted: Wanted) -> Sequence[ScanProblem]:
        if not self.used_by(model):
            return []
        same: dict[str, Any] = {"x": wanted.io}
        if isinstance(model, Mamba):
            same |= {"headdim": model.headdim, "d_state": model.d_state, "dt": wanted.io, "D": wanted.io, "dt_bias": wanted.io}
            same |= {"z": model.gate}
        elif isinstance(model, LinearAttention):
            same |= WITHOUT_DT | {"headdim": model.dim_v, "d_state": model.dim_k, "gate": Gate.SLOPE, "g": DType.F32}
        pool: dict[str, Any] = {"cu_seqlens": Index.I32, "pool": True, "started": True}
        kinds = [{"final": True} if index is Index.NONE else pool | {"index": index} for index in wanted.indices]
        return [ScanProblem(**same, **kind, state=state) for state in wanted.states or (model.state,) for kind in kinds]

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return batch * model.nheads


ASKS = {OPERATOR: ScanAsk()}
