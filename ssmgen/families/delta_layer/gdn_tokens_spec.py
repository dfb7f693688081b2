"""gdn_layer of several tokens per sequence: `delta_layer_tokens.py` with a decay per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from . import tokens_spec as delta_layer_tokens
from .gdn_spec import GdnLayerSpec, HeadDecay
from .tokens_spec import DeltaLayerTokensProblem, DeltaLayerTokensSpec

OPERATOR = "gdn_layer_tokens"


@dataclass(frozen=True, kw_only=True)
class GdnLayerTokensProblem(HeadDecay, DeltaLayerTokensProblem):
    """What a call fixes."""

    def faults(self) -> list[str]:
        return [*DeltaLayerTokensProblem.faults(self), *self.gate_faults()]


@dataclass(frozen=True, kw_only=True)
class GdnLayerTokensSpec(DeltaLayerTokensSpec, GdnLayerTokensProblem):
    """A problem, and how one variant computes it."""

    family: ClassVar[str] = OPERATOR
    call_names: ClassVar[Mapping[str, str]] = GdnLayerSpec.call_names


problems = partial(delta_layer_tokens.problems, GdnLayerTokensProblem)
space = partial(delta_layer_tokens.space, GdnLayerTokensSpec)
candidates = partial(delta_layer_tokens.candidates, GdnLayerTokensSpec)
