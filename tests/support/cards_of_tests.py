"""The cards that workers of a test run share, the memory of each, and the order of their tests."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence

import pytest
import torch

# Files of tests/gpu whose tests take at least 1.5 times the mean time, estimated from the order in which tests of 22 workers ended.
LONGEST = tuple(
    f"test_{name}.py"
    for name in (
        "hf_robust_gpu", "mamba3_chunk_scan_gpu", "demo_gpu", "chunk_delta_prepare_gpu", "context_gpu", "readme", "accelerate_gpu",
        "chunk_delta_segments_gpu", "chunk_attention_gpu", "chunk_scan_gpu", "chunk_scan_warpgroups_gpu", "chunk_delta_warpgroups_gpu",
        "selective_state_update", "repeats_gpu",
    )
)  # fmt: skip
BATCH = 4  # tests that a worker gets at a time; pytest-xdist's first batches for 22 workers are 60 tests, often of one file


def turn(item: pytest.Item) -> int:
    """The rank of a test's file: a run ends late if its longest tests begin late."""
    return LONGEST.index(item.path.name) if item.path.parent.name == "gpu" and item.path.name in LONGEST else len(LONGEST)


def take_few(options: argparse.Namespace) -> None:
    """Lets pytest-xdist give each worker few tests at a time, unless the command names a number."""
    if getattr(options, "maxschedchunk", BATCH) is None:
        options.maxschedchunk = BATCH


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
