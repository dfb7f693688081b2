"""The kernels that prompts of models of gated delta rules need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...engine.chunks.segments import LEAST, by_rule
from ...engine.recurrences.attention.model import AttentionModel
from ...engine.recurrences.attention.problem import Beta
from ...select.models import Ask, Client, Model, Role, Wanted
from ...spec.kernel import DType, Index, Layout
from .problem import OPERATOR, DeltaProblem, Gate

# Options of calls, by caller. Batches return their states; if a cache already has tokens, they also begin with its states.
BATCHES: tuple[dict[str, Any], ...] = ({"final": True}, {"initial": True, "final": True})
OWN: dict[str, Any] = {"pool": True, "started": True}
# Engines' betas are f32. vLLM's states are dense and f32, and its q and k already have length one, except in OLMo-Hybrid.
VLLM: dict[str, Any] = {"beta": DType.F32, "state": DType.F32, "layout": Layout.VK, "initial": True, "final": True}
SGLANG: dict[str, Any] = OWN | {"beta": DType.F32, "layout": Layout.VK}


class DeltaAsk(Ask):
    """The prompts of Gated DeltaNet models; the problems fix neither tokens nor heads.

    Gates are log decays in f32; betas have the activations' dtype or f32, with the sigmoid applied. Without slots: batches, new and after a
    cache. With slots: packed sequences with a pool, where a flag per sequence tells whether it continues, and as the drop-ins of vLLM and
    SGLang pass them; with `intermediates` also the states after chunks that their prefix caches need.
    """

    operator = OPERATOR
    role = Role.SCAN
    options = frozenset(("pools", "tokens", "layout", "intermediates"))

    def used_by(self, model: Model) -> bool:
        return model.kind == "gated_delta_rule"

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is not Client.MAMBA_SSM

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} has no gated delta rule, which {asked} computes"

    def problems(self, model: Model, wanted: Wanted) -> Sequence[DeltaProblem]:
        if not isinstance(model, AttentionModel):
            return []
        shape: dict[str, Any] = {"head_k": model.dim_k, "head_v": model.dim_v, "x": wanted.io, "gate": Gate.LOG, "g": DType.F32}
        found: list[DeltaProblem] = []
        for state in wanted.states or (model.state,):
            same = shape | {"beta": wanted.io, "l2norm": True, "layout": wanted.layout, "state": state}
            for index in wanted.indices:
                if index is Index.NONE:
                    gates = [{}, *_raw(model, wanted)] if wanted.caller is Client.TRANSFORMERS else [{}]
                    found += [DeltaProblem(**same | gate | kind) for gate in gates for kind in BATCHES]
                else:
                    packed = same | {"cu_seqlens": Index.I32}
                    found += [DeltaProblem(**packed | kind, index=index) for kind in ((OWN, SGLANG) if wanted.by() else (SGLANG,))]
                    found += [DeltaProblem(**packed | VLLM | {"l2norm": norm}) for norm in (False, True)]
                    pooled = [] if model.allow_neg_eigval else [packed | _of_vllm(wanted.io)]
                    found += [DeltaProblem(**kind, index=index) for kind in pooled]
                    if wanted.intermediates and wanted.update_state:
                        found += [DeltaProblem(**kind, index=index, checkpoints=Index.I64) for kind in pooled if state is DType.F32]
                        found.append(DeltaProblem(**packed | SGLANG, index=index, checkpoints=Index.I32))
                        found.append(DeltaProblem(**packed | VLLM | {"l2norm": False}, checkpoints=Index.I64))
        few: dict[str, Any] = {"segments": by_rule(model.nheads, model.dim_v), "segment_chunks": LEAST}
        found += [replace(problem, **few) for problem in found if few["segments"] > 1]  # for prompts that are cut
        return list(dict.fromkeys(found))

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return model.nheads * batch


def _of_vllm(io: DType) -> dict[str, Any]:
    """A pool and raw gates, as vLLM's Qwen layers pass them, with dt_bias in the activations' dtype. OLMo-Hybrid's layers do not."""
    raw = {"g": io, "gate": Gate.RAW, "A_log": DType.F32, "dt_bias": io, "beta": io, "beta_form": Beta.SIGMOID}
    return OWN | raw | {"layout": Layout.VK}


def _raw(model: AttentionModel, wanted: Wanted) -> list[dict[str, Any]]:
    """Gates as the projections produce them, weights in the activations' dtype. Layers of transformers pass them, except OLMo-Hybrid's."""
    io = wanted.io
    raw = {"g": io, "gate": Gate.RAW, "A_log": io, "dt_bias": io, "beta": io, "beta_form": Beta.SIGMOID}
    return [] if model.allow_neg_eigval else [raw]


ASKS = {OPERATOR: DeltaAsk()}
