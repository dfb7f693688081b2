"""Context parallelism for delta rules. M is [K, K] per head: the final state of rows of the identity, with v = 0.

On a GPU, a batch of one sequence, or the packed sequence that continues on the next rank, is split into parts, like segments. Kernels
compute N and M of all parts at once, from chunk images that are kept. Once the initial state is known, they compute the outputs of all
parts at once, each part from its own initial state.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...calls.context import Arguments, Asked, Context, Ends
from .parts import Parts


def parted(rows: Iterable[str], function: Any, given: dict[str, Any], start: Tensor | None, asked: Asked) -> Ends:
    """N and M by dedicated kernels if these support the call, else by the function itself."""
    return Parts(function, given).ends(start, asked) if cheap(given) else whole(rows, function, given, start, asked)


def whole(rows: Iterable[str], function: Any, given: dict[str, Any], start: Tensor | None, asked: Asked) -> Ends:
    """N and M by the function itself. rows: parameters that are v, or are multiplied with it."""
    _, N = function(**given, initial_states=start, return_final_states=True)
    return Ends(N, transitions(rows, function, given) if asked.M else None)


def transitions(rows: Iterable[str], function: Any, given: dict[str, Any]) -> Tensor:
    """M by the function itself: the final state of rows of the identity, with zeros for v."""
    v = given["v"]
    sequences = 1 if given.get("cu_seqlens") is not None else len(v)
    _, identity = blank(given)
    zeros = {name: v.new_zeros((*v.shape[:-1], identity.shape[-1])) for name in rows}
    rest = {name: t for name, t in given.items() if name not in ("out", "workspace")} | zeros
    _, M = function(**rest, initial_states=identity.expand(sequences, -1, -1, -1), return_final_states=True)
    assert isinstance(M, Tensor)
    return M


def blank(given: Arguments) -> tuple[Tensor, Tensor]:
    v: Tensor = given["v"]
    (heads, head_v), head_k = v.shape[-2:], given["k"].shape[-1]
    state = (head_k, head_v) if given.get("state_layout") == "kv" else (head_v, head_k)
    identity = torch.eye(head_k, dtype=torch.float32, device=v.device).expand(1, heads, head_k, head_k)
    return v.new_zeros((1, heads, *state), dtype=torch.float32), identity


def passed(S: Tensor, N: Tensor, M: Tensor, given: Arguments) -> Tensor:
    by = M.double()
    return (by @ S if given.get("state_layout") == "kv" else S @ by) + N.double()


def cheap(given: Arguments) -> bool:
    """Whether kernels for N and M support the call: one sequence, on a GPU."""
    v = given["v"]
    return v.is_cuda and (v.dim() == 3 or len(v) == 1)


REFUSED = (
    "state", "state_indices", "has_initial_state", "checkpoint_positions", "checkpoints_out", "return_checkpoints",
)  # fmt: skip


def rule(*rows: str, parts: bool) -> Context:
    """parts: whether the family has kernels for N and M."""
    made = parted if parts else whole
    return Context("cu_seqlens", ("v", -3), blank, partial(made, rows), passed, cheap if parts else lambda given: False, REFUSED)
