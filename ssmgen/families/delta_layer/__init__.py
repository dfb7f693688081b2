"""gdn_layer, kda_layer: the decode step of a whole layer of gated DeltaNet or of Kimi delta attention, between its projections."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="delta_layer",
    kernels=(
        Kernels(
            "spec:DeltaLayerSpec",
            "problem:DeltaLayerProblem",
            old_names=dict.fromkeys(("gdn_layer", "gdn_layer_tokens", "kda_layer", "kda_layer_tokens"), ""),
        ),
    ),
    launches={"layer_gated_norm": "norm"},
    functions={"gdn_layer": "call:gdn_layer", "kda_layer": "call:kda_layer"},
    bench={"gdn_layer": "bench:BENCHES", "kda_layer": "bench:BENCHES"},
    asks="models:ASKS",
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    trials="trial:TRIALS",
    page="operators/decode_layers.md",
)
