"""SGLang's verification of drafts: trees, of which each token's first child and next sibling are given, and the states after each token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError


def parents_of(
    function: str, shape: tuple[int, int], next_token: Tensor | None, next_sibling: Tensor | None, parent_token: Tensor | None
) -> Tensor:
    """The parent of each token, [batch, T] int64, of the first child and the next sibling of each, in which -1 is none.

    A token that is nobody's child has parent 0, the root, as in SGLang. It reads nothing on the host, and may be captured.
    Raises ArgumentError unless all three, of which the last is for the result, are there, of this shape and int32 or int64.
    """
    named = {"retrieve_next_token": next_token, "retrieve_next_sibling": next_sibling, "retrieve_parent_token": parent_token}
    problems = []
    for name, t in named.items():
        if t is None:
            problems.append(f"{name} is None; a draft tree needs " + ", ".join(named))
        elif t.shape != shape or t.dtype not in (torch.int32, torch.int64):
            kind = str(t.dtype).removeprefix("torch.")
            problems.append(f"{name} is {list(t.shape)} of {kind}, not [batch, T] = {list(shape)} of int32 or int64")
    if problems or next_token is None or next_sibling is None:
        raise ArgumentError(function, problems)
    tokens = torch.arange(shape[1], device=next_token.device)
    elder = next_sibling[:, :, None] == tokens  # [batch, T (who), T (whom)]
    eldest = torch.where(elder.any(1), elder.int().argmax(1), tokens)
    for _ in range((shape[1] - 1).bit_length()):  # each time twice as far, to the first of the siblings
        eldest = eldest.gather(1, eldest)
    child = next_token[:, :, None] == tokens
    return child.int().argmax(1).gather(1, eldest)


def steps_of(function: str, buffer: Tensor, cache_steps: int | None, rows: Tensor | None) -> Tensor:
    """The buffer that receives the states after each token. Raises ArgumentError unless it has cache_steps of them, and rows are named."""
    problems = [] if rows is not None else ["intermediate_states_buffer is given without intermediate_state_indices"]
    if buffer.dim() != 5 or buffer.shape[1] != cache_steps:
        problems.append(f"cache_steps is {cache_steps}, and intermediate_states_buffer is {list(buffer.shape)}")
    if problems:
        raise ArgumentError(function, problems)
    return buffer
