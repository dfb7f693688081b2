"""kda_layer of several tokens per sequence: `delta_layer_tokens.py` with a decay per key channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from . import tokens_spec as delta_layer_tokens
from .kda_spec import ChannelDecay, KdaLayerSpec
from .tokens_spec import DeltaLayerTokensProblem, DeltaLayerTokensSpec

OPERATOR = "kda_layer_tokens"


@dataclass(frozen=True, kw_only=True)
class KdaLayerTokensProblem(ChannelDecay, DeltaLayerTokensProblem):
    """What a call fixes."""

    def faults(self) -> list[str]:
        return [*DeltaLayerTokensProblem.faults(self), *self.gate_faults()]


@dataclass(frozen=True, kw_only=True)
class KdaLayerTokensSpec(DeltaLayerTokensSpec, KdaLayerTokensProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR
    call_names: ClassVar[Mapping[str, str]] = KdaLayerSpec.call_names


problems = partial(delta_layer_tokens.problems, KdaLayerTokensProblem)
space = partial(delta_layer_tokens.space, KdaLayerTokensSpec)
candidates = partial(delta_layer_tokens.candidates, KdaLayerTokensSpec)
