"""mamba3_chunk_scan: prompts of Mamba-3, SISO and MIMO."""

from ...spec.family import Family, Kernels

PART = "it is the first of two kernels of a call, which are checked together. Pass the spec of the second one, with warpgroups."

FAMILY = Family(
    name="mamba3_chunk_scan",
    kernels=(
        Kernels("spec:Mamba3ScanSpec", "problem:Mamba3PromptProblem", rules="rules"),
        Kernels("roles:Mamba3RolesSpec"),
        Kernels("warpgroups:Mamba3WarpgroupsSpec"),
        Kernels("prepare:Mamba3PrepareSpec", unchecked=PART),
    ),
    functions={"mamba3_chunk_scan": "call:mamba3_chunk_scan"},
    helpers={"mamba3_chunk_scan_workspace": "call:mamba3_chunk_scan_workspace"},
    bench={"mamba3_chunk_scan": "bench:BENCH"},
    asks="models:ASKS",
    defaults="defaults:DEFAULTS",
    sharding="sharding:RULES",
    trials="trial:TRIALS",
    page="operators/mamba3_chunk_scan.md",
)
