"""mamba2_layer: the decode step of a whole Mamba-2 layer, between its projections."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="mamba2_layer",
    kernels=(Kernels("spec:Mamba2LayerSpec", "spec:Mamba2LayerProblem", old_names={"mamba2_layer_tokens": "several=yes"}),),
    launches={"layer_gated_norm": "norm"},
    functions={"mamba2_layer": "call:mamba2_layer"},
    bench={"mamba2_layer": "bench:BENCH"},
    asks="models:ASKS",
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    trials="trial:TRIALS",
    page="operators/decode_layers.md",
)
