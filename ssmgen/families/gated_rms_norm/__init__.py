"""gated_rms_norm: the norm between a state and the output projection, by itself and as the last kernel of a decode layer;
rms_norm: the norm between layers, which adds the residual; gated_layer_norm: a norm that subtracts the mean."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="gated_rms_norm",
    kernels=(
        Kernels("spec:NormSpec", "spec:NormProblem"),
        Kernels(
            "spec:LayerGatedNormSpec", unchecked="it is the last kernel of a layer, which is checked as a whole. Pass the layer's spec."
        ),
    ),
    functions={"gated_rms_norm": "call:gated_rms_norm", "gated_layer_norm": "centred:gated_layer_norm", "rms_norm": "plain:rms_norm"},
    bench={"gated_rms_norm": "bench:BENCH"},
    asks="models:ASKS",
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    trials="trial:TRIALS",
    page="operators/gated_rms_norm.md",
)
