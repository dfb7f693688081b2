"""chunk_delta_rule: the gated delta rule and DeltaNet over prompts, in chunks of tokens on the tensor cores."""

from ...family import Family, Kernels

FAMILY = Family(
    name="chunk_delta_rule",
    kernels=(Kernels("chain:ChainSpec", "problem:DeltaProblem"), Kernels("prepare:PrepareSpec")),
)
