"""vllm's merge_attn_states: the attention to a shared prefix and to the rest, merged.

LSEs are natural logarithms, [heads, tokens]; +inf and -inf, and NaN too, are those of nothing. head_dim is a multiple of 4 up to 1024.
Raises what ssmgen.combine_splits raises.
"""

from __future__ import annotations

from torch import Tensor

from ..ops.combine_splits import combine_splits


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """output, prefix_output, suffix_output: [tokens, heads, head_dim]; the LSEs [heads, tokens] f32. Writes output and output_lse."""
    lse_out = None if output_lse is None else output_lse.t()
    combine_splits((prefix_output, suffix_output), (prefix_lse.t(), suffix_lse.t()), out=output, lse_out=lse_out)
