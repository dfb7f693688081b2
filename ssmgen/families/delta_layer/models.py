"""What models of gated delta rules and of Kimi delta attention ask of their decode layers."""

from __future__ import annotations

from ...engine.layer_models import LayerAsk
from ...models import SEVERAL
from . import gdn_spec, gdn_tokens_spec, kda_spec, kda_tokens_spec

OPTIONS = SEVERAL | {"layout"}

ASKS = {
    ask.operator: ask
    for ask in (
        LayerAsk(gdn_spec.OPERATOR, "gated_delta_rule", gdn_spec.GdnLayerProblem, gdn_tokens_spec.problems, OPTIONS),
        LayerAsk(kda_spec.OPERATOR, "kda", kda_spec.KdaLayerProblem, kda_tokens_spec.problems, OPTIONS),
    )
}
