"""chunk_delta_rule: the gated delta rule and DeltaNet over prompts, in chunks of tokens on the tensor cores."""

from ...spec.family import Family, Kernels

PART = "it is one of several kernels of a call, which are checked together. Pass the spec of the last one, the chain."
PARTS = [f"chunk_delta_rule_{kind}{role}" for role in ("lead", "sums", "ends") for kind in ("", "warpgroup_")]

FAMILY = Family(
    name="chunk_delta_rule",
    kernels=(
        Kernels("chain:ChainSpec", "problem:DeltaProblem", parts=dict.fromkeys(PARTS, PART)),
        Kernels("prepare:PrepareSpec", unchecked=PART),
        Kernels("spec:JoinSpec", unchecked=PART),
    ),
    functions={"chunk_gated_delta_rule": "call:chunk_gated_delta_rule", "chunk_delta_rule": "call:chunk_delta_rule"},
    helpers={"chunk_delta_rule_workspace": "call:chunk_delta_rule_workspace"},
    bench={"chunk_delta_rule": "bench:BENCH"},
    defaults="defaults:DEFAULTS",
    sharding="sharding:RULES",
    context="context:RULES",
    trials="trial:TRIALS",
    asks="models:ASKS",
    page="operators/chunk_delta_rule.md",
)
