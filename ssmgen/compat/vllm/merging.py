"""vLLM's function that merges attention to a shared prefix with that to the rest, as in vLLM 0.33."""

from __future__ import annotations

from torch import Tensor

from ...errors import UnsupportedError
from ...families.combine_splits.call import combine_splits
from ..shared import merging as _merging
from ..shared.operands import takes as _takes

_ROWS, _LSES = "[tokens, heads, head_dim]", "[heads, tokens]"


@_takes(output=_ROWS, prefix_output=_ROWS, prefix_lse=_LSES, suffix_output=_ROWS, suffix_lse=_LSES, output_lse=_LSES)
def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """Merges attention to a shared prefix with attention to the rest: both outputs are weighted by their softmax sums.

    output, prefix_output, suffix_output: [tokens, heads, head_dim] f32, f16 or bf16, head_dim 1 … 1024; output is written
    prefix_lse, suffix_lse: [heads, tokens] f32, natural logarithms; +inf, -inf and NaN mark an empty part
    output_lse: [heads, tokens] f32, is written; None for none
    prefill_tokens_with_context: tokens from this one on have no prefix, and their suffix is copied; None for all with prefix

    Returns None. Raises UnsupportedError with output_scale (FP8 outputs), and ArgumentError (a ValueError) for operands that do not fit.
    """
    if output_scale is not None:
        raise UnsupportedError("vllm's merge_attn_states", ["output_scale is given; expected None: outputs are f32, f16 or bf16"])
    lse_out = None if output_lse is None else output_lse.t()
    outputs, lses = (prefix_output, suffix_output), (prefix_lse.t(), suffix_lse.t())
    n = prefill_tokens_with_context
    if n is None or (type(n) is int and n >= output.shape[0]):
        combine_splits(outputs, lses, out=output, lse_out=lse_out)
        return
    given = (output, *outputs) if output_lse is None else (output, *outputs, output_lse, prefix_lse, suffix_lse)
    _merging.check_copies(n, given)
    lse_head = None if lse_out is None else lse_out[:n]
    combine_splits([t[:n] for t in outputs], [t[:n] for t in lses], out=output[:n], lse_out=lse_head)
    output[n:].copy_(suffix_output[n:])
    if output_lse is not None:
        output_lse[:, n:].copy_(suffix_lse[:, n:])
