"""gdn_layer: a decode step of a gated delta rule layer between its projections: `delta_layer.py` with a decay per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...spec import must
from ..linear_attention.problem import Gate
from . import spec as delta_layer
from .spec import DeltaLayerProblem, DeltaLayerSpec

OPERATOR = "gdn_layer"


class HeadDecay:
    """Of a layer's problem. g is the raw gate of each head."""

    def gate_faults(self) -> list[str]:
        gated = self.g and self.A_log and self.gate is Gate.SOFTPLUS and not self.gk
        return must(bool(gated), "the decay is per head, with g and A_log, and a softplus")


@dataclass(frozen=True, kw_only=True)
class GdnLayerProblem(HeadDecay, DeltaLayerProblem):
    """What a call fixes."""

    def faults(self) -> list[str]:
        return [*DeltaLayerProblem.faults(self), *self.gate_faults()]


@dataclass(frozen=True, kw_only=True)
class GdnLayerSpec(DeltaLayerSpec, GdnLayerProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR
    call_names: ClassVar[Mapping[str, str]] = {"g": "a", "beta": "b"}


space = partial(delta_layer.space, GdnLayerSpec)
candidates = partial(delta_layer.candidates, GdnLayerSpec)
whole_heads = partial(delta_layer.whole_heads, GdnLayerSpec)
