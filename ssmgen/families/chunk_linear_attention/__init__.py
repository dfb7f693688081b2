"""chunk_linear_attention: KDA, GLA and others whose state decays per key channel, over prompts, in chunks of tokens on the tensor cores."""

from ...family import Family

FAMILY = Family(name="chunk_linear_attention", kernels=())
