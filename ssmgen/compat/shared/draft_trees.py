"""SGLang's verification of drafts: the states that are kept after each token."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import ArgumentError
from .gated_delta import first


def steps_of(function: str, buffer: Tensor, cache_steps: int | None, rows: Tensor | None) -> Tensor:
    """The buffer that receives the states after each token. Raises ArgumentError unless it has cache_steps of them, and rows are named."""
    problems = (
        []
        if rows is not None
        else ["intermediate_states_buffer is given without intermediate_state_indices; expected both. Pass the indices."]
    )
    if buffer.dim() != 5 or buffer.shape[1] != cache_steps:
        problems.append(
            f"cache_steps is {cache_steps} and intermediate_states_buffer {list(buffer.shape)}; expected that many steps in its second axis"
        )
    if problems:
        raise ArgumentError(function, problems)
    return buffer


def kept_of_drafts(
    function: str, buffer: Tensor | None, cache_steps: int | None, rows: Tensor | None, parents: Tensor | None, v: Tensor,
    cu_seqlens: Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """The buffer, its rows and the tree, as ssmgen's decode steps of linear attention take them; nothing without a buffer."""
    if buffer is None:
        return {}
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tree = first(parents, sequences)
    return {
        "intermediate_states": steps_of(function, buffer, cache_steps, rows),
        "intermediate_state_indices": first(rows, sequences),
        "parents": tree if tree is None or cu_seqlens is not None else tree[:, : v.shape[1]],
    }
