"""chunk_linear_attention: KDA, GLA and others whose state decays per key channel, over prompts, in chunks of tokens on the tensor cores."""

from ...spec.family import Family, Kernels

_FUNCTIONS = ("chunk_kda", "chunk_gla", "chunk_gdn2", "chunk_comba", "chunk_rwkv7", "chunk_dplr_delta_rule")

PART = "it is one of several kernels of a call, which are checked together. Pass the spec of the last one, the chain."
PARTS = [f"chunk_linear_attention_{kind}{role}" for role in ("lead", "sums", "ends") for kind in ("", "warpgroup_")]

FAMILY = Family(
    name="chunk_linear_attention",
    kernels=(
        Kernels("chain:ChainSpec", "problem:LinearPromptProblem", parts=dict.fromkeys(PARTS, PART)),
        Kernels("prepare:PrepareSpec", unchecked=PART),
        Kernels("spec:JoinSpec", unchecked=PART),
    ),
    functions={name: f"call:{name}" for name in _FUNCTIONS},
    helpers={"chunk_linear_attention_workspace": "call:chunk_linear_attention_workspace"},
    bench={"chunk_linear_attention": "bench:BENCH"},
    defaults="defaults:DEFAULTS",
    sharding="sharding:RULES",
    context="context:RULES",
    trials="trial:TRIALS",
    asks="models:ASKS",
    page="operators/chunk_linear_attention.md",
)
