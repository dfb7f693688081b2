"""chunk_linear_attention: KDA, GLA and others whose state decays per key channel, over prompts, in chunks of tokens on the tensor cores."""

from ...family import Family

_FUNCTIONS = ("chunk_kda", "chunk_gla", "chunk_gdn2", "chunk_comba", "chunk_rwkv7", "chunk_dplr_delta_rule")

FAMILY = Family(
    name="chunk_linear_attention",
    kernels=(),
    functions={name: f"call:{name}" for name in _FUNCTIONS},
    helpers={"chunk_linear_attention_workspace": "call:chunk_linear_attention_workspace"},
    sharding="sharding:RULES",
    page="operators/chunk_linear_attention.md",
)
