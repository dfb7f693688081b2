"""mamba3_state_update: decode steps of Mamba-3, SISO and MIMO, of one token and of several."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="mamba3_state_update",
    kernels=(Kernels("spec:Mamba3Spec", "spec:Mamba3Problem"),),
    functions={"mamba3_state_update": "call:mamba3_state_update", "mamba3_layer": "layer:mamba3_layer"},
    bench={"mamba3_state_update": "bench:BENCH"},
    asks="models:ASKS",
    models="models:KINDS",
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    trials="trial:TRIALS",
    page="operators/mamba3_state_update.md",
)
