"""linear_attention: decode steps of gated delta rules and their relatives, which are choices of one recurrence."""

from ...family import Family, Kernels

FUNCTIONS = (
    "comba", "delta_rule", "dplr_delta_rule", "gated_delta_rule", "gated_delta_rule_commit", "gdn2", "gla", "kda", "kda_commit",
    "lightning_attn", "rwkv7", "simple_gla",
)  # fmt: skip
TIMED = ("gated_delta_rule", "kda", "gla", "simple_gla", "lightning_attn", "delta_rule", "rwkv7", "gdn2", "comba")

FAMILY = Family(
    name="linear_attention",
    kernels=(Kernels("spec:LinearAttentionSpec", "problem:LinearAttentionProblem"),),
    functions={name: f"call:{name}" for name in FUNCTIONS},
    types={"Ring": "views:RawInputs"},
    bench=dict.fromkeys(TIMED, "bench"),
    tuning="tuning:TUNING",
    defaults="defaults:DEFAULTS",
    sharding="sharding:RULES",
    trials="trial:TRIALS",
    page="operators/linear_attention.md",
)
