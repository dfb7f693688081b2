"""selective_scan: Mamba-1 over prompts, token by token with states in registers."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="selective_scan",
    kernels=(Kernels("spec:SelectiveSpec", "problem:SelectiveProblem", rules="rules"), Kernels("roles:RolesSpec")),
    functions={"selective_scan": "call:selective_scan"},
    bench={"selective_scan": "bench:BENCH"},
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    trials="trial:TRIALS",
    asks="models:ASKS",
    page="operators/selective_scan.md",
)
