"""Tiles of prompts: the arguments of tensor maps for tensors with rows per token."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..spec.arguments import Tiles

COLUMNS = 64  # 128 bytes of a row in shared memory


def maps(views: Mapping[str, Tensor], columns: Mapping[str, int], tokens: int) -> dict[str, Tiles]:
    """The kernel's arguments `{operand}_tiles`. views: [batch, T, heads, width] of 16-bit numbers. One copy takes `tokens` tokens and, for
    each operand, its number of `columns`. With 0 columns it takes 64 of any width, from any column on, and zeros past the last one."""
    return {f"{operand}_tiles": _tiles(operand, views[operand], wide, tokens) for operand, wide in columns.items()}


def _tiles(operand: str, t: Tensor, columns: int, tokens: int) -> Tiles:
    batch, length, heads, width = t.shape
    sizes = (COLUMNS, length, width // COLUMNS, heads, batch) if columns else (width, length, 1, heads, batch)
    strides = (t.stride(1), COLUMNS, t.stride(2), t.stride(0))
    size = t.element_size()
    # An axis of size 1 is never stepped over, so its stride is replaced: the driver refuses some strides.
    steps = tuple(s * size if n > 1 else 16 for n, s in zip(sizes[1:], strides, strict=True))
    return Tiles(operand, sizes, steps, (COLUMNS, tokens, columns // COLUMNS or 1, 1, 1))
