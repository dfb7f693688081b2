"""The decode layer kernels that models of gated delta rules and of Kimi delta attention need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...engine.layers.models import LayerAsk
from ...select.models import SEVERAL, Client, Model, Wanted
from .problem import DeltaLayerProblem

OPTIONS = SEVERAL | {"layout"}


class DeltaLayerAsk(LayerAsk):
    """A decode step; transformers' modules hold A_log in the dtype of activations. OLMo-Hybrid's are not replaced.

    SGLang calls gdn_layer with a norm, vLLM without one.
    """

    def called_by(self, model: Model, caller: Client) -> bool:
        engines = caller is Client.ENGINES and self.operator == "gdn_layer"
        return (engines or super().called_by(model, caller)) and not getattr(model, "allow_neg_eigval", False)

    def one_token(self, model: Model, wanted: Wanted) -> list[Any]:
        found = super().one_token(model, wanted)
        if wanted.caller is Client.TRANSFORMERS:
            return [replace(p, A_log=wanted.io) for p in found]
        if wanted.caller is Client.ENGINES:
            found = [p for p in found if p.conv.len < model.conv_width]
            return found + [replace(p, norm=type(p.norm)()) for p in found]
        return found


ASKS = {
    "gdn_layer": DeltaLayerAsk("gdn_layer", "gated_delta_rule", DeltaLayerProblem, OPTIONS),
    "kda_layer": DeltaLayerAsk("kda_layer", "kda", DeltaLayerProblem, OPTIONS),
}
