"""The cards that workers of a test run share, and the memory of each."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch


def order(worker: int, given: str | None, count: int) -> str | None:
    """CUDA_VISIBLE_DEVICES for a worker: all cards, and first the one that most of its tests use. Workers take turns with the first.

    given: the variable's value before; count: cards that are visible with it. None: leave it as it is.
    """
    cards: Sequence[str] = given.split(",")[:count] if given else [str(n) for n in range(count)]
    first = worker % count if count else 0
    return ",".join([*cards[first:], *cards[:first]]) if count > 1 else None


def give_back(above: int = 1 << 30) -> None:
    """Frees the memory that the allocator holds but does not need, if it has reserved more than `above` bytes."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > above:
        gc.collect()
        torch.cuda.empty_cache()
