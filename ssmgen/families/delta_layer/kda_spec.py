"""kda_layer: a decode step of a Kimi delta attention layer between its projections: `delta_layer.py` with a decay per key channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...spec import must
from . import spec as delta_layer
from .spec import DeltaLayerProblem, DeltaLayerSpec

OPERATOR = "kda_layer"


class ChannelDecay:
    """Of a layer's problem. gk is the raw gate of each key channel."""

    def gate_faults(self) -> list[str]:
        return must(bool(self.gk and not self.g), "the decay is per key channel, with gk")


@dataclass(frozen=True, kw_only=True)
class KdaLayerProblem(ChannelDecay, DeltaLayerProblem):
    """What a call fixes."""

    def faults(self) -> list[str]:
        return [*DeltaLayerProblem.faults(self), *self.gate_faults()]


@dataclass(frozen=True, kw_only=True)
class KdaLayerSpec(DeltaLayerSpec, KdaLayerProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR
    call_names: ClassVar[Mapping[str, str]] = {"gk": "g"}


space = partial(delta_layer.space, KdaLayerSpec)
candidates = partial(delta_layer.candidates, KdaLayerSpec)
whole_heads = partial(delta_layer.whole_heads, KdaLayerSpec)
