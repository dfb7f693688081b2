"""selective_state_update: decode steps of Mamba-1 and Mamba-2, of one token and of several."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="selective_state_update",
    kernels=(Kernels("spec:SsuSpec", "spec:SsuProblem", old_names={"selective_state_update_tokens": "several=yes"}),),
    functions={"selective_state_update": "call:selective_state_update"},
    bench={"selective_state_update": "bench:BENCH"},
    asks="models:ASKS",
    models="models:KINDS",
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    trials="trial:TRIALS",
    page="operators/selective_state_update.md",
)
