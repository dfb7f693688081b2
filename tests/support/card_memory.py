"""Memory of the card, which workers share."""

from __future__ import annotations

import gc

import torch


def give_back(above: int = 1 << 30) -> None:
    """Frees the memory that the allocator holds but does not need, if it has reserved more than `above` bytes."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > above:
        gc.collect()
        torch.cuda.empty_cache()
