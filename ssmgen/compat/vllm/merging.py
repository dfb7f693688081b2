"""vLLM's function that merges attention to a shared prefix with that to the rest, as in vLLM 0.33."""

from __future__ import annotations

from torch import Tensor

from ...calls import checks
from ...errors import ArgumentError, UnsupportedError
from ...families.combine_splits.call import combine_splits
from ..shared.operands import takes as _takes

_ROWS, _LSES = "[tokens, heads, head_dim]", "[heads, tokens]"
_MERGED = ("output", "prefix_output", "suffix_output", "output_lse", "prefix_lse", "suffix_lse")


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
    _check_copies(n, given)
    lse_head = None if lse_out is None else lse_out[:n]
    combine_splits([t[:n] for t in outputs], [t[:n] for t in lses], out=output[:n], lse_out=lse_head)
    output[n:].copy_(suffix_output[n:])
    if output_lse is not None:
        output_lse[:, n:].copy_(suffix_lse[:, n:])


def _check_copies(count: int, tensors: tuple[Tensor, ...]) -> None:
    """Raises ArgumentError for faults that a merge of the first `count` tokens would not find, because the other tokens are copied.

    tensors: in the order of _MERGED, as the call gave them; the last three may be missing"""
    problems = [] if type(count) is int and count >= 0 else [f"prefill_tokens_with_context is {count!r}; expected a number of tokens"]
    memory = [(t.data_ptr(), t.data_ptr() + (t.nbytes if t.is_contiguous() else checks.extent(t))) for t in tensors]
    for i in range(0, len(tensors), 3):
        name, whole, suffix, (start, end) = _MERGED[i], tensors[i], tensors[i + 2], memory[i]
        if whole.shape != suffix.shape:
            problems.append(f"{_MERGED[i + 2]} is {list(suffix.shape)}; expected {list(whole.shape)}, the shape of {name}")
        checks.check_distinct({name: whole}, (name,), problems)
        for j, (first, last) in enumerate(memory):
            in_place = i < j < i + 3 and whole.stride() == tensors[j].stride() and start == first and whole.dtype == tensors[j].dtype
            if j != i and start < last and first < end and not in_place:
                problems.append(f"{name} overlaps {_MERGED[j]} in memory; expected separate memory")
    if problems:
        raise ArgumentError("vllm's merge_attn_states", problems)
