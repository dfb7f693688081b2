"""Checks of vLLM's attention merge for the tokens that it copies."""

from __future__ import annotations

from torch import Tensor

from ...calls import checks
from ...errors import ArgumentError

_MERGED = ("output", "prefix_output", "suffix_output", "output_lse", "prefix_lse", "suffix_lse")


def check_copies(count: int, tensors: tuple[Tensor, ...]) -> None:
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
