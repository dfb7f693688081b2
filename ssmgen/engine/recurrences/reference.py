"""Functions that the references of all recurrences use."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def softplus(v: Tensor) -> Tensor:
    """log(1 + e^v), accurate where v is very negative and without overflow where it is large."""
    return v.clamp(min=0) + torch.log1p(torch.exp(-v.abs()))


def start_slot(views: Mapping[str, Tensor], b: int) -> int:
    """Where sequence b starts from; -1 if its count of accepted tokens is out of range."""
    if "state_indices" not in views:
        return b
    indices = views["state_indices"][b]
    if "num_accepted_tokens" not in views:
        return int(indices)
    accepted = int(views["num_accepted_tokens"][b])
    return int(indices[accepted - 1]) if 1 <= accepted <= indices.shape[0] else -1
