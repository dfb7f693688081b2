"""causal_conv1d: the short convolution over prompts."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="causal_conv1d",
    kernels=(Kernels("spec:ConvSpec", "spec:ConvProblem"),),
    functions={"causal_conv1d": "call:causal_conv1d"},
    bench={"causal_conv1d": "bench:BENCH"},
    asks="models:ASKS",
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    context="context:RULES",
    trials="trial:TRIALS",
    page="operators/causal_conv1d.md",
)
