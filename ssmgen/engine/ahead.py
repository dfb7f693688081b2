"""Asking L2 for what the next kernel reads, a projection's weight say, while memory has little to do: blocks behind those of a norm do so.

A weight that L2 cannot hold is asked for in part, in pieces all over it. So where the next kernel reads from, some of that is there, and
memory and L2 have both something to do; of one end's alone, first the one would wait and then the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..calls import checks

NAME = "prefetch"  # of the operand
PIECE = 4096  # bytes of a request, which is a thread's only one
PER_BLOCK = 32  # requests
MOST = 16 << 20  # bytes: what memory gives in 4 us, a third of an H200's L2
ALIGNMENT = 16


def apart(
    named: Mapping[str, Any], like: str, problems: list[str], views_of: Callable[[Mapping[str, Any]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Views of all operands, where `views_of` knows all but this one. Adds to `problems`."""
    views = views_of({name: t for name, t in named.items() if name != NAME})
    if NAME not in named:
        return views
    given, beside = named[NAME], named.get(like)
    if not checks.check_tensors({NAME: given}, problems):
        return {}
    if isinstance(beside, Tensor) and given.device != beside.device:
        problems.append(f"{NAME} is on {given.device}, {like} is on {beside.device}")
    if not given.is_contiguous():
        problems.append(f"{NAME} has strides {list(given.stride())}; what is asked for must be contiguous")
    return views | {NAME: given} if views else views


def is_asked_for(views: Mapping[str, Tensor], pointers: Mapping[str, int]) -> bool:
    """Whether there is something, where L2 can be asked for it."""
    return NAME in views and pointers[NAME] % ALIGNMENT == 0


def pieces_of(asked: Tensor) -> int:
    return min(asked.numel() * asked.element_size(), MOST) // PIECE


def blocks_of(views: Mapping[str, Tensor]) -> int:
    """Blocks that ask."""
    return -(-pieces_of(views[NAME]) // PER_BLOCK)


def values_of(views: Mapping[str, Tensor], blocks: int) -> dict[str, int]:
    """The arguments of a kernel whose other blocks are so many."""
    if NAME not in views:
        return {}
    asked = views[NAME]
    pieces, whole = pieces_of(asked), asked.numel() * asked.element_size() // PIECE
    return {"other_blocks": blocks, "pieces": pieces, "piece_distance": whole // max(pieces, 1) * PIECE}
