"""gdn_layer, kda_layer: the decode step of a whole layer of gated DeltaNet or of Kimi delta attention, between its projections."""

from ...family import Family, Kernels

FAMILY = Family(
    name="delta_layer",
    kernels=(
        Kernels("gdn_spec:GdnLayerSpec", "gdn_spec:GdnLayerProblem"),
        Kernels("gdn_tokens_spec:GdnLayerTokensSpec", "gdn_tokens_spec:GdnLayerTokensProblem"),
        Kernels("kda_spec:KdaLayerSpec", "kda_spec:KdaLayerProblem"),
        Kernels("kda_tokens_spec:KdaLayerTokensSpec", "kda_tokens_spec:KdaLayerTokensProblem"),
    ),
    functions={"gdn_layer": "gdn_call:gdn_layer", "kda_layer": "kda_call:kda_layer"},
    bench={"gdn_layer": "bench", "kda_layer": "bench"},
    asks="models:ASKS",
    tuning="tuning:TUNING",
    defaults="defaults:DEFAULTS",
    trials="trial:TRIALS",
    page="operators/decode_layers.md",
)
