"""New tensors for outputs that a call was not given."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def new_like(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """An uninitialised dense tensor of this shape (x's by default). Its last two axes are contiguous in the same order as x's."""
    shape = tuple(x.shape if shape is None else shape)
    if len(shape) < 2 or x.stride(-1) == 1 or x.stride(-1) <= x.stride(-2):
        return x.new_empty(shape)
    return x.new_empty((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
