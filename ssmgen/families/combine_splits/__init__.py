"""combine_splits: merges the partial results of split-KV attention."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="combine_splits",
    kernels=(Kernels("spec:CombineSpec", "spec:CombineProblem"),),
    functions={"combine_splits": "call:combine_splits"},
    bench={"combine_splits": "bench:BENCH"},
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    trials="trial:TRIALS",
    page="operators/combine_splits.md",
)
