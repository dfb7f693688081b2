"""SGLang's verification of drafts: the states that are kept after each token."""

from __future__ import annotations

from torch import Tensor

from ...errors import ArgumentError


def steps_of(function: str, buffer: Tensor, cache_steps: int | None, rows: Tensor | None) -> Tensor:
    """The buffer that receives the states after each token. Raises ArgumentError unless it has cache_steps of them, and rows are named."""
    problems = [] if rows is not None else ["intermediate_states_buffer is given without intermediate_state_indices"]
    if buffer.dim() != 5 or buffer.shape[1] != cache_steps:
        problems.append(f"cache_steps is {cache_steps}, and intermediate_states_buffer is {list(buffer.shape)}")
    if problems:
        raise ArgumentError(function, problems)
    return buffer
