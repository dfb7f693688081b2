"""Formats of a state, and their roundings of f32 numbers in place: the numbers that ssmgen's kernels store, as f32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = 1 << 23  # random words that are made once; each rounding takes a stretch of them that begins anywhere


class Noise:
    """A random 31-bit word for each number of a rounding. The kernels draw Philox words, of which any distribution is as uniform."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, 2**31, (WORDS,), generator=self.generator, dtype=torch.int32)

    def like(self, values: Tensor) -> Tensor:
        start = int(torch.randint(0, WORDS - values.numel(), (1,), generator=self.generator))
        return self.words[start : start + values.numel()].view(values.shape)


def bf16_with_noise(values: Tensor, words: Tensor) -> Tensor:
    """Adds 16 random bits below the last place, then truncates. values: finite, not near the largest number."""
    bits = values.view(torch.int32)
    return bits.add_(words & 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def f16_with_noise(values: Tensor, words: Tensor) -> Tensor:
    """As `bf16_with_noise`; numbers below 2^-14 become multiples of 2^-24. values: below 65504."""
    least = torch.tensor(2.0**-14, device=values.device)
    shift = torch.where(values.abs() < least, least.copysign(values), 0.0)  # f32 then has 13 bits below 2^-24
    bits = (values + shift).view(torch.int32)
    return bits.add_(words & 0x1FFF).bitwise_and_(-0x2000).view(torch.float32) - shift


def to_nearest(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda values, words: values.to(dtype).to(torch.float32)


def integers(most: float, noise: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Integers up to `most`, times the scale of their row: its largest magnitude over `most`."""

    def rounded(values: Tensor, words: Tensor) -> Tensor:
        scale = values.abs().amax(-1, keepdim=True).clamp_(min=2.0**-100).div_(most)
        values.div_(scale)
        if noise:  # to 2^-16 of a step, as the kernels do
            values.mul_(65536.0).round_().add_(words & 0xFFFF).mul_(2.0**-16).floor_()
        else:
            values.round_()
        return values.clamp_(-most, most).mul_(scale)

    return rounded


def float8(noise: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """float8_e4m3fn, times the scale of the row: its largest magnitude over 448."""

    def rounded(values: Tensor, words: Tensor) -> Tensor:
        scale = values.abs().amax(-1, keepdim=True).clamp_(min=2.0**-100).div_(448.0)
        values.div_(scale)
        if noise:
            step = torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent.clamp_(min=-5) - 4)  # of the last place
            values = (values.abs() / step + (words >> 7) * 2.0**-24).floor_().mul_(step).clamp_(max=448.0).copysign_(values)
        else:
            values = values.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).to(torch.float32)
        return values.mul_(scale)

    return rounded


@dataclass(frozen=True)
class Format:
    """bits: of a stored element; rounded: None for f32; inputs: whether the recurrence's inputs are rounded to bf16, and not the state

    once: the state is rounded after one token only, as in a cached prefix, and is f32 otherwise
    """

    name: str
    bits: int
    rounded: Callable[[Tensor, Tensor], Tensor] | None = None
    inputs: bool = False
    once: bool = False


FORMATS = [
    Format("float32", 32),
    Format("float32, inputs in bfloat16", 32, inputs=True),
    Format("bfloat16", 16, to_nearest(torch.bfloat16)),
    Format("bfloat16, noise", 16, bf16_with_noise),
    Format("float16", 16, to_nearest(torch.float16)),
    Format("float16, noise", 16, f16_with_noise),
    Format("int16", 16, integers(32767.0, False)),
    Format("int8", 8, integers(127.0, False)),
    Format("int8, noise", 8, integers(127.0, True)),
    Format("int8, once", 8, integers(127.0, False), once=True),
    Format("float8_e4m3fn", 8, float8(False)),
    Format("float8_e4m3fn, noise", 8, float8(True)),
]
