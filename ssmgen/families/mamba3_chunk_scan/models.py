"""The kernels that prompts of Mamba-3 models need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engine.recurrences.mamba3.model import Mamba3Model
from ...select.models import Ask, Client, Model, Role, Wanted
from ...spec.kernel import DType, Index
from .problem import Mamba3PromptProblem
from .spec import OPERATOR

# States of a call without slots: new ones, from zeros and after given states.
BATCHES: tuple[dict[str, Any], ...] = ({"pool": True, "final": True}, {"initial": True, "pool": True, "final": True})
# Calls of patched layers with a cache: new prompts, and pieces that continue.
LAYERS: tuple[dict[str, Any], ...] = ({"pool": True}, {"pool": True, "started": True})


class Mamba3PromptAsk(Ask):
    """Prompts of Mamba-3 models; the problems fix neither tokens nor heads.

    Without slots: batches that return their states, new and after a cache; of patched layers, with their cache in place. With slots: packed
    sequences with pools, where a flag per sequence tells whether it continues.
    """

    operator = OPERATOR
    role = Role.SCAN
    options = frozenset(("pools", "tokens"))

    def used_by(self, model: Model) -> bool:
        return isinstance(model, Mamba3Model)

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is Client.MAMBA_SSM  # its patched layers

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} is not Mamba-3, which {asked} computes"

    def problems(self, model: Model, wanted: Wanted) -> Sequence[Mamba3PromptProblem]:
        if not isinstance(model, Mamba3Model):
            return []
        io = wanted.io
        same: dict[str, Any] = {"z": True, "D": DType.F32, "dt_bias": DType.F32, "row_bias": DType.F32}
        same |= dict.fromkeys(("x", "dt", "A", "trap", "angle", "row_norm", "k_state", "v_state"), io)
        same |= {name: getattr(model, name) for name in ("headdim", "d_state", "rank", "angles", "rotary", "rate")}
        same |= {"mimo": DType.F32 if model.rank > 1 else None, "norm_weight": io if model.norm else None}
        batches = LAYERS if wanted.caller is Client.MAMBA_SSM else BATCHES
        kinds = [kind for index in wanted.indices for kind in (batches if index is Index.NONE else (_packed(index),))]
        return [Mamba3PromptProblem(**same, **kind, state=s) for s in wanted.states or (model.state,) for kind in kinds]

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return batch * model.nheads


def _packed(index: Index) -> dict[str, Any]:
    return {"cu_seqlens": Index.I32, "pool": True, "started": True, "index": index}


ASKS = {OPERATOR: Mamba3PromptAsk()}
