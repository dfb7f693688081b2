"""The kernels that speculative decoding by replay needs, for Mamba-2 models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...engine.recurrences.mamba.model import MambaModel
from ...select.models import Ask, Client, Model, Role, Wanted
from ...spec.kernel import DType
from .problem import MAX_TOKENS, History, ReplayProblem
from .spec import OPERATOR


class ReplayAsk(Ask):
    """Steps alone, and steps after the model's convolution."""

    operator = OPERATOR
    role = Role.REPLAY
    switch, most = "replay", MAX_TOKENS
    narrow = True

    def used_by(self, model: Model) -> bool:
        return model.kind == "mamba2"

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is Client.ENGINES

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} is not Mamba-2, which {asked} computes"

    def problems(self, model: Model, wanted: Wanted) -> Sequence[ReplayProblem]:
        io, tokens, window = wanted.io, wanted.replay, wanted.window
        assert isinstance(model, MambaModel) and tokens is not None, "nothing is asked where `used_by` or `serves` says no"
        first = ReplayProblem(
            d_state=model.d_state,
            headdim=model.headdim,
            nheads=model.nheads,
            ngroups=model.ngroups,
            x=io,
            dt=io,
            A=DType.F32,
            D=io,
            z=io if model.gate else None,
            dt_bias=io,
            out=io,
            history=History.STEP if window is None else History.RING,
            tokens=room(tokens),
            window=room(tokens if window is None else window),
        )
        kinds = [
            (state, index, behind) for state in wanted.states or (model.state,) for index in wanted.indices for behind in (False, True)
        ]
        return [replace(first, state=state, index=index, after_conv=behind) for state, index, behind in kinds]


def room(tokens: int) -> int:
    """Tokens that a kernel has room for: a multiple of eight."""
    return max(8, -(-tokens // 8) * 8)


ASKS = {OPERATOR: ReplayAsk()}
