"""The kernels that prompts need in models whose state decays per key channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...engine.chunks.segments import LEAST, by_rule
from ...engine.recurrences.attention.model import AttentionModel
from ...engine.recurrences.attention.problem import Beta
from ...select.models import Ask, Client, Model, Role, Wanted
from ...spec.kernel import DType, Index
from .problem import OPERATOR, LinearPromptProblem, Rule
from .spec import FEWEST

# Options of calls. Batches return their states; if a cache already has tokens, they also begin with its states. Packed sequences use states
# in a pool, or dense ones.
BATCHES: tuple[dict[str, Any], ...] = ({"final": True}, {"initial": True, "final": True})
OWN: dict[str, Any] = {"pool": True, "started": True}
DENSE: dict[str, Any] = {"initial": True, "final": True}


class LinearAsk(Ask):
    """The prompts of KDA and RWKV-7 models; the problems fix neither tokens nor heads.

    KDA's gates are log decays in f32, with betas of the activations' dtype and the sigmoid applied, as in transformers; or raw outputs of
    the projections, for the kernel to finish, as in decode steps. Without slots: batches, new and after a cache. With slots: packed
    sequences with a pool, where a flag per sequence tells whether it continues, and with dense states; with `intermediates` also states
    after chunks, with the pool.
    """

    operator = OPERATOR
    role = Role.SCAN
    options = frozenset(("pools", "tokens", "layout", "intermediates"))

    def used_by(self, model: Model) -> bool:
        return model.kind in ("kda", "rwkv7")

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is not Client.MAMBA_SSM and model.kind == "kda"

    def absent(self, model: Model, asked: str) -> str:
        return f"the state of {model.name} does not decay per key channel, as {asked} computes it"

    def problems(self, model: Model, wanted: Wanted) -> Sequence[LinearPromptProblem]:
        if not isinstance(model, AttentionModel):
            return []
        found: list[LinearPromptProblem] = []
        for state in wanted.states or (model.state,):
            for recurrence in _recurrences(model, wanted):
                same = recurrence | {"head_k": model.dim_k, "head_v": model.dim_v, "x": wanted.io, "layout": wanted.layout, "state": state}
                for index in wanted.indices:
                    if index is Index.NONE:
                        found += [LinearPromptProblem(**same | kind) for kind in BATCHES]
                        continue
                    packed = same | {"cu_seqlens": Index.I32}
                    found += [LinearPromptProblem(**packed | OWN, index=index), LinearPromptProblem(**packed | DENSE)]
                    if wanted.intermediates and wanted.update_state:
                        found.append(LinearPromptProblem(**packed | OWN, index=index, checkpoints=Index.I32))
        few: dict[str, Any] = {"segments": by_rule(model.nheads, model.dim_v, FEWEST), "segment_chunks": LEAST}
        found += [replace(problem, **few) for problem in found if few["segments"] > 1 and problem.rule.weighs]  # for prompts that are cut
        return list(dict.fromkeys(found))

    def size(self, model: Model, wanted: Wanted, batch: int) -> int:
        return model.nheads


def _recurrences(model: AttentionModel, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """The operands other than q, k and v, in each of their forms. transformers' modules hold A_log in the dtype of activations."""
    io = wanted.io
    A_log = io if wanted.caller is Client.TRANSFORMERS else DType.F32
    if model.kind == "rwkv7":
        yield {"rule": Rule.LOW_RANK, "gk": io, "read": True, "alpha": io}
        return
    yield {"gk": DType.F32, "beta": io, "l2norm": True}
    form = Beta.TWICE_SIGMOID if model.allow_neg_eigval else Beta.SIGMOID
    yield {"gk": io, "dt_bias": DType.F32, "gate": model.gate, "A_log": A_log, "beta": io, "beta_form": form, "l2norm": True}


ASKS = {OPERATOR: LinearAsk()}
