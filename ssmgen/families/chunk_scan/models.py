"""The kernels that prompts of Mamba-2 and Lightning attention models need."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ...engine.recurrences.attention.model import AttentionModel
from ...engine.recurrences.mamba.model import MambaModel
from ...select.models import Ask, Client, Model, Role, Wanted
from ...spec.kernel import DType, Index
from .spec import OPERATOR, WITHOUT_DT, Gate, ScanProblem
from .warpgroups import may_stay

# States of a call. Batches return theirs, and begin with a cache's states if it has tokens; `PACKED` lists the packed sequences.
BATCHES: tuple[dict[str, Any], ...] = ({"final": True}, {"initial": True, "final": True})
NEW = BATCHES[:1]
OWN_POOL: dict[str, Any] = {"pool": True, "started": True}
PACKED: tuple[dict[str, Any], ...] = (OWN_POOL, {"pool": True}, {"pool": True, "initial": True}, *BATCHES)
MARKED: tuple[dict[str, Any], ...] = ({"checkpoints": Index.I32}, {"checkpoints": Index.I32, "initial": True})


class ScanAsk(Ask):
    """The prompts of Mamba-2 and Lightning attention models; the problems fix neither tokens nor heads.

    Without slots: batches of transformers and mamba-ssm, new and after a cache, with transformers' limits of steps if a model has them.
    With slots: packed sequences with a pool, where a flag per sequence tells whether it continues; into a pool from zeros or from dense
    states (vLLM); and with dense states alone (SGLang, TensorRT-LLM). With `intermediates`, Mamba-2 also gets vLLM's states after chunks,
    except with rows of 256, where a few registers spill, which a build refuses.
    Each also in the form of many short sequences, if blocks with warpgroups then stay.
    Built when a call needs them: z, which otherwise gates after the scan, seq_idx, and batches that return no state.
    """

    operator = OPERATOR
    role = Role.SCAN
    options = frozenset(("pools", "tokens", "intermediates"))

    def used_by(self, model: Model) -> bool:
        return model.kind in ("mamba2", "lightning_attn")

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is not Client.MAMBA_SSM or model.kind == "mamba2"

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} is neither Mamba-2 nor Lightning attention, which {asked} computes"

    def takes(self, model: Model) -> Collection[str]:
        return self.options if isinstance(model, MambaModel) else self.options - {"intermediates"}

    def problems(self, model: Model, wanted: Wanted) -> Sequence[ScanProblem]:
        if not self.used_by(model):
            return []
        same: dict[str, Any] = {"x": wanted.io}
        batches, packed = BATCHES, PACKED
        if isinstance(model, MambaModel):
            same |= {"headdim": model.headdim, "d_state": model.d_state, "dt": wanted.io, "D": wanted.io, "dt_bias": wanted.io}
            batches = tuple(kind | {"dt_limit": model.dt_limit} for kind in BATCHES if wanted.caller is not Client.MAMBA_SSM or kind in NEW)
            packed = packed if wanted.by() else packed[1:]
            packed += MARKED if wanted.intermediates and wanted.update_state and model.d_state <= 128 else ()
        elif isinstance(model, AttentionModel):
            same |= WITHOUT_DT | {"headdim": model.dim_v, "d_state": model.dim_k, "gate": Gate.SLOPE, "g": DType.F32}
            batches, packed = NEW, (OWN_POOL,)
            if wanted.caller is Client.ENGINES:  # SGLang gathers the states first
                packed = BATCHES[1:]
        kinds = [kind for index in wanted.indices for kind in (batches if index is Index.NONE else _by_slots(packed, index))]
        if isinstance(model, AttentionModel) and wanted.caller is Client.ENGINES:  # vLLM calls the scan for each sequence
            kinds += BATCHES[1:]
        found = list(dict.fromkeys(ScanProblem(**same, **kind, state=s) for s in wanted.states or (model.state,) for kind in kinds))
        return found + [replace(problem, short=True) for problem in found if may_stay(problem, model.nheads)]

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return model.nheads


def _by_slots(kinds: Sequence[dict[str, Any]], index: Index) -> list[dict[str, Any]]:
    return [kind | {"cu_seqlens": Index.I32, "index": index if kind.get("pool") else Index.NONE} for kind in kinds]


ASKS = {OPERATOR: ScanAsk()}
