"""linear_attention: decode steps of gated delta rules and their relatives, which are choices of one recurrence."""

from ...spec.family import Family, Kernels

FUNCTIONS = (
    "gated_delta_rule", "kda", "gdn2", "delta_rule", "comba", "rwkv7", "dplr_delta_rule", "gla", "simple_gla", "lightning_attn", "rwkv6",
    "gated_delta_rule_commit", "kda_commit",
)  # fmt: skip
TIMED = ("gated_delta_rule", "kda", "gla", "simple_gla", "lightning_attn", "delta_rule", "rwkv6", "rwkv7", "gdn2", "comba")

FAMILY = Family(
    name="linear_attention",
    kernels=(Kernels("spec:LinearAttentionSpec", "spec:LinearAttentionProblem"),),
    functions={name: f"call:{name}" for name in FUNCTIONS},
    types={"Ring": "planning:RawInputs"},
    bench=dict.fromkeys(TIMED, "bench:BENCHES"),
    asks="models:ASKS",
    models="models:KINDS",
    defaults="defaults:DEFAULTS",
    sharding="sharding:RULES",
    trials="trial:TRIALS",
    page="operators/linear_attention.md",
)
