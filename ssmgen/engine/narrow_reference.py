"""States with scales (int16, int8, float8_e4m3fn) in plain PyTorch: a stored element times the scale of its row is the number."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls.checks import NARROW
from .stochastic_reference import words_of

_SMALLEST = 2.0**-100  # rows whose largest element is smaller get the scale of this size: scales must have inverses


def widened(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers [..., N] of a stored state; scale [...], or None if it has no scales."""
    return stored.to(dtype) if scale is None else stored.to(dtype) * scale.to(dtype)[..., None]


def narrowed(state: Tensor, dtype: torch.dtype, seed: int = 0, rounds: int = 0, slot: int = 0, stream: int = 0) -> tuple[Tensor, Tensor]:
    """(elements of `dtype`, scales [heads, headdim] float32) of a slot's new state [heads, headdim, d_state].

    A row's scale is its largest magnitude over the largest number of the type. Elements are rounded to nearest even, or with the slot's
    noise if rounds > 0. A row with an element that is not finite has the scale NaN or infinity.
    """
    scale = (state.abs().amax(-1).clamp(min=_SMALLEST) * (1 / torch.tensor(NARROW[dtype].largest, dtype=state.dtype))).float()
    values = state / scale.to(state.dtype)[..., None]
    if rounds:
        random = words_of(state.numel(), seed, rounds, slot, stream, state.device).view(state.shape)
        return rounded_narrow(values, dtype, random), scale
    if dtype == torch.float8_e4m3fn:
        return values.clamp(-448, 448).to(dtype), scale
    most = NARROW[dtype].largest
    return values.nan_to_num(0, most, -most).round().clamp(-most, most).to(dtype), scale


def rounded_narrow(values: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """values, rounded to f32 and then up or down with a random 32-bit word each.

    Integers: rounds up with the probability of the fraction cut off, to 2^-16. float8_e4m3fn: uses as many random bits as are cut off, at
    most 31.
    """
    if dtype != torch.float8_e4m3fn:
        most = NARROW[dtype].largest
        parts = (values.float().nan_to_num(0, most, -most).clamp(-most, most) * 65536.0).round().long()
        return (parts + (random & 0xFFFF) >> 16).to(dtype)
    bits = values.float().view(torch.int32).long() & 0xFFFFFFFF
    sign, size = bits >> 31, bits & 0x7FFFFFFF
    cut = 141 - (size >> 23).clamp(max=120)
    used = cut.clamp(max=31)
    digits = (size & 0x7FFFFF | 0x800000) >> (cut - used).clamp(max=31)
    small = digits + (random & (1 << used) - 1) >> used
    normal = (size + (random & 0xFFFFF) - (120 << 23) >> 20).clamp(max=0x7E)
    result = torch.where(size < 121 << 23, small, torch.where(size < 0x7F800000, normal, 0x7F)) | sign << 7
    return result.to(torch.uint8).view(dtype)
