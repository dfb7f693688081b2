"""decode_attention: the attention of one new token per sequence, with its rotation, norms and place in the cache."""

from ...spec.family import Family, Kernels

FAMILY = Family(
    name="decode_attention",
    kernels=(Kernels("spec:DecodeAttentionSpec", "spec:DecodeAttentionProblem"),),
    functions={"decode_attention": "call:decode_attention"},
    sharding="operands:RULES",
    trials="trial:TRIALS",
    bench={"decode_attention": "bench:BENCH"},
    defaults="defaults:DEFAULTS",
    page="operators/decode_attention.md",
)
