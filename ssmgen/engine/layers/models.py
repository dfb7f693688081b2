"""The problems that models have for a decode layer, for any recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...select.models import SEVERAL, Ask, Client, Model, Role, Wanted
from ...spec.kernel import PoolMode, Problem, flat, made
from ..short_conv import MAX_TOKENS
from ..window import StateLayout
from .problem import Layer


@dataclass(frozen=True)
class LayerAsk(Ask):
    """A decode step for every window layout in use: windows as runs, with and without the input that has left the
    convolution, and inputs as rows of channels. Norms whose groups span several ranks are left out.

    problem: the problem of such models' calls.
    """

    operator: str
    kind: str  # of models
    problem: type[Layer]
    options: frozenset[str] = SEVERAL

    role = Role.LAYER

    def used_by(self, model: Model) -> bool:
        return model.kind == self.kind

    def called_by(self, model: Model, caller: Client) -> bool:
        return caller is Client.TRANSFORMERS

    def absent(self, model: Model, asked: str) -> str:
        return f"{model.name} has no layer that {asked} computes"

    def serves(self, wanted: Wanted) -> bool:
        return wanted.count <= MAX_TOKENS  # for more tokens, models use the separate operators

    def problems(self, model: Model, wanted: Wanted) -> list[Problem]:
        found = self.one_token(model, wanted)
        if wanted.count == 1 and not wanted.intermediates and wanted.update_state:
            return found
        return [p for one in found for p in one.of_tokens(wanted.count, wanted.intermediates, wanted.update_state)]

    def one_token(self, model: Model, wanted: Wanted) -> list[Any]:
        """The problems of calls with one token."""
        width, io = model.conv_width, wanted.io
        windows = [(StateLayout.RUNS, width - 1), (StateLayout.RUNS, width), (StateLayout.CHANNELS, width - 1)]
        if wanted.caller is Client.TRANSFORMERS:
            windows = windows[1:2]
        same: dict[str, Any] = {"conv_width": width, "conv_weight": io, "conv_bias": io if model.conv_bias else None}
        norms: list[Any] = model.norms(io)  # one at most
        for norm in norms:
            same |= {f"norm_{name}": getattr(norm, name) for name in ("size", "grouped", "activation")}
            same |= {"norm": norm.weight, "norm_gate": norm.gate, "norm_first": norm.norm_first}
        how: dict[str, Any] = {"layout": wanted.layout} if "layout" in self.options else {}
        states = wanted.states or (model.state,)
        recurrences = [model.problem(state, index, PoolMode.SINGLE, io=io, **how) for state in states for index in wanted.indices]
        given = [flat(problem) | same for problem in recurrences]
        return [made(self.problem, one | {"conv_layout": layout, "conv_len": length}) for one in given for layout, length in windows]
