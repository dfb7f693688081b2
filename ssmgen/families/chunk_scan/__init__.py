"""chunk_scan: Mamba-2 (SSD) over prompts, in chunks of tokens on the tensor cores."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="chunk_scan",
    kernels=(
        Kernels("spec:ScanSpec", "spec:ScanProblem", rules="rules"),
        Kernels("warpgroups:WarpgroupScanSpec"),
        Kernels("ends:EndsSpec", unchecked="only calls over several ranks use it"),
    ),
    functions={
        "chunk_scan": "call:chunk_scan",
        "chunk_simple_gla": "attention:chunk_simple_gla",
        "chunk_lightning_attn": "attention:chunk_lightning_attn",
    },
    bench={"chunk_scan": "bench:BENCH"},
    defaults="defaults:DEFAULTS",
    sharding="operands:RULES",
    context="context:RULES",
    trials="trial:TRIALS",
    asks="models:ASKS",
    page="operators/chunk_scan.md",
)
