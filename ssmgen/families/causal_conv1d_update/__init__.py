"""causal_conv1d_update: the short convolution's decode step."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="causal_conv1d_update",
    kernels=(Kernels("spec:UpdateSpec", "spec:UpdateProblem"),),
    functions={"causal_conv1d_update": "call:causal_conv1d_update"},
    bench={"causal_conv1d_update": "bench:BENCH"},
    asks="models:ASKS",
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    trials="trial:TRIALS",
    page="operators/causal_conv1d_update.md",
)
