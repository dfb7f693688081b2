"""Tiles of prompts: what a tensor map says of rows per token."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..spec.arguments import Tiles

COLUMNS = 64  # of a row of 128 bytes in shared memory


def maps(views: Mapping[str, Tensor], columns: Mapping[str, int], tokens: int) -> dict[str, Tiles]:
    """The kernel's arguments `{operand}_tiles`. views: [batch, T, heads, width] of 16-bit numbers; a copy takes so many `columns` of each
    operand named there, of so many tokens; 0: 64 of a width that is no multiple of it, from any column on, and zeros past the last one."""
    return {f"{operand}_tiles": _tiles(operand, views[operand], wide, tokens) for operand, wide in columns.items()}


def _tiles(operand: str, t: Tensor, columns: int, tokens: int) -> Tiles:
    batch, length, heads, width = t.shape
    sizes = (COLUMNS, length, width // COLUMNS, heads, batch) if columns else (width, length, 1, heads, batch)
    strides = (t.stride(1), COLUMNS, t.stride(2), t.stride(0))
    size = t.element_size()
    # What is never stepped over may lie at any distance, also at such as the driver refuses.
    steps = tuple(s * size if n > 1 else 16 for n, s in zip(sizes[1:], strides, strict=True))
    return Tiles(operand, sizes, steps, (COLUMNS, tokens, columns // COLUMNS or 1, 1, 1))
