"""chunk_delta_rule: the gated delta rule and DeltaNet over prompts, in chunks of tokens on the tensor cores."""

from ...family import Family, Kernels

FAMILY = Family(
    name="chunk_delta_rule",
    kernels=(
        Kernels("chain:ChainSpec", "problem:DeltaProblem"),
        Kernels("warpgroups:WarpgroupChainSpec"),
        Kernels("prepare:PrepareSpec", unchecked="it is the first of two kernels, and is checked with the second: give that one's spec"),
    ),
    functions={"chunk_gated_delta_rule": "call:chunk_gated_delta_rule", "chunk_delta_rule": "call:chunk_delta_rule"},
    helpers={"chunk_delta_rule_workspace": "call:chunk_delta_rule_workspace"},
    bench={"chunk_delta_rule": "bench"},
    tuning="tuning:TUNING",
    defaults="defaults:DEFAULTS",
    sharding="sharding:RULES",
    trials="trial:TRIALS",
    asks="models:ASKS",
    page="operators/chunk_delta_rule.md",
)
