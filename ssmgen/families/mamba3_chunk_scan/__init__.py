"""mamba3_chunk_scan: prompts of Mamba-3, SISO and MIMO."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="mamba3_chunk_scan",
    kernels=(
        Kernels("spec:Mamba3ScanSpec", "problem:Mamba3PromptProblem", rules="rules"),
        Kernels("roles:Mamba3RolesSpec"),
    ),
    functions={"mamba3_chunk_scan": "call:mamba3_chunk_scan"},
    bench={"mamba3_chunk_scan": "bench:BENCH"},
    asks="models:ASKS",
    defaults="defaults:DEFAULTS",
    sharding="sharding:RULES",
    trials="trial:TRIALS",
    page="operators/mamba3_chunk_scan.md",
)
