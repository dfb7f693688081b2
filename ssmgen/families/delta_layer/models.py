"""What models of gated delta rules and of Kimi delta attention ask of their decode layers."""

from __future__ import annotations

from ...engine.layer_models import LayerAsk
from ...models import SEVERAL
from .problem import DeltaLayerProblem

OPTIONS = SEVERAL | {"layout"}

ASKS = {
    "gdn_layer": LayerAsk("gdn_layer", "gated_delta_rule", DeltaLayerProblem, OPTIONS),
    "kda_layer": LayerAsk("kda_layer", "kda", DeltaLayerProblem, OPTIONS),
}
