"""How sequences of chunk_delta_rule's functions go on from one rank's tokens to the next one's: M is [K, K] of each head, what rows of the
identity become where v is zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...calls.context import Arguments, Context


def ends(function: Callable[..., Any], given: dict[str, Any], start: Tensor, middle: bool) -> tuple[Tensor, Tensor | None]:
    """N and M by the function itself: M as the final state of rows of the identity, with zeros in place of v and of its gate."""
    _, N = function(**given, initial_states=start, return_final_states=True)
    if not middle:
        return N, None
    _, identity = blank(given, len(start))
    keys, v = identity.shape[-1], given["v"]
    zeros = {name: v.new_zeros((*v.shape[:-1], keys)) for name in ("v", "w") if isinstance(given.get(name), Tensor) and given[name].shape == v.shape}
    rest = {name: t for name, t in given.items() if name not in ("out", "workspace")}
    _, M = function(**rest | zeros, initial_states=identity, return_final_states=True)
    return N, M


def blank(given: Arguments, sequences: int = 1) -> tuple[Tensor, Tensor]:
    v, k = given["v"], given["k"]
    heads, head_v, head_k = *v.shape[-2:], k.shape[-1]
    state = (head_k, head_v) if given.get("state_layout") == "kv" else (head_v, head_k)
    identity = torch.eye(head_k, dtype=torch.float32, device=v.device).expand(sequences, heads, head_k, head_k)
    return v.new_zeros((sequences, heads, *state), dtype=torch.float32), identity


def passed(S: Tensor, N: Tensor, M: Tensor, given: Arguments) -> Tensor:
    by = M.double()
    return (by @ S if given.get("state_layout") == "kv" else S @ by) + N.double()


REFUSED = (
    "state", "state_indices", "has_initial_state", "checkpoint_positions", "checkpoints_out", "return_checkpoints",
)  # fmt: skip
RULE = Context("cu_seqlens", ("v", -3), blank, ends, passed, lambda given: False, REFUSED)
RULES = {"chunk_gated_delta_rule": RULE, "chunk_delta_rule": RULE}
