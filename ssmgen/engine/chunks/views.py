"""What calls have in common whose first kernel leaves images for the second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ...calls import checks, prompts
from ...errors import ArgumentError

Views = Mapping[str, Tensor]
WRITTEN = ("out", "final_states", "state", "checkpoints", "workspace")
ALIGNMENT = 16  # of the workspace, whose images are copied so many bytes at once


def v_sizes(views: Views) -> tuple[int, int, int]:
    """(tokens of all sequences, sequences, heads of v)"""
    batch, length, heads, _ = views["v"].shape
    return batch * length, prompts.sequences_of(views, "v"), heads


def check_workspace(views: Views, wanted: int, said: str, problems: list[str]) -> None:
    """Whether the workspace can hold what a call leaves there. wanted: bytes; said: the call that tells how many."""
    workspace, v = views["workspace"], views["v"]
    if workspace.device != v.device:
        problems.append(f"workspace is on {workspace.device}, v is on {v.device}")
    if workspace.dtype != torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        problems.append(f"workspace is {checks.describe(workspace)}, not dense bytes: [{wanted} or more] uint8")
    elif workspace.numel() < wanted:
        problems.append(f"workspace has {workspace.numel()} bytes, and this call needs {wanted}: {said}")


def check_alignment(operator: str, pointers: Mapping[str, int]) -> None:
    """Raises ArgumentError where the workspace cannot lie there."""
    if pointers["workspace"] % ALIGNMENT:
        raise ArgumentError(operator, [f"workspace does not begin at a multiple of {ALIGNMENT} bytes"])


def axes_of(per_token: Iterable[str]) -> dict[str, dict[str, int]]:
    """{operand: {what an axis is: its number}} of views, of the axes whose strides kernels take."""
    return {
        **dict.fromkeys(per_token, {"batch": 0, "token": 1, "head": 2}),
        **dict.fromkeys(("A_log", "dt_bias"), {"head": 0}),
        **dict.fromkeys(prompts.STATES, {"slot": 0, "head": 1}),
        **dict.fromkeys(("cu_seqlens", "state_indices", "has_initial_state"), {"sequence": 0}),
        "checkpoint_positions": {"position": 0},
    }


def writes(views: Views) -> bool:
    """Whether there is anything to be written."""
    return prompts.sequences_of(views, "v") > 0 and bool(views["v"].numel() or any(n in views for n in ("final_states", "state")))
