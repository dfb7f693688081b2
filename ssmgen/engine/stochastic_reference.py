"""Stochastic rounding in plain PyTorch: away from zero with a probability equal to the fraction that is cut off."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def philox(seed: Tensor | int, counter: Tensor, rounds: int, stream: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The 4 random 32-bit words of Philox-4x32 for a seed and each int64 counter, as int64. Stream 0 is Triton's randint4x(seed, counter).

    Source: Salmon et al. 2011.
    """
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    c0, c1, c2, c3 = counter & _WORD, counter >> 32 & _WORD, torch.full_like(counter, stream), torch.zeros_like(counter)
    for _ in range(rounds):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # modulo 2^64: the words are correct for either sign
        c0, c1, c2, c3 = b >> 32 & _WORD ^ c1 ^ k0, b & _WORD, a >> 32 & _WORD ^ c3 ^ k1, a & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


def rounded(values: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """values, rounded to f32 and then stochastically to float16 or bfloat16 with a random 32-bit word each.

    values, random: of one shape, random as int64. Adds a random bit for each bit that is cut off. In float16, numbers below 2^-14, whose
    last place is 2^-24, are first rounded to multiples of 2^-37. Finite values stay finite: they saturate at the largest number.
    """
    values = values.float()
    if dtype == torch.bfloat16:
        bits = values.view(torch.int32).long() & _WORD
        sign, size = bits >> 31, bits & 0x7FFFFFFF
        finite = (size + (random & 0xFFFF)).clamp(max=0x7F7FFFFF) >> 16
        special = size >> 16 | (size > 0x7F800000).long() << 6 | sign << 15  # NaN stays NaN
    else:
        least = torch.tensor(2.0**-14, device=values.device)
        small = values.abs() < least
        bits = torch.where(small, values + least.copysign(values), values).view(torch.int32).long() & _WORD
        sign, size = bits >> 31, bits & 0x7FFFFFFF
        finite = (size + (random & 0x1FFF) - (112 << 23) >> 13).clamp(max=0x7BFF) - small.long() * 0x400
        special = torch.where(size > 0x7F800000, 0x7FFF, 0x7C00 | sign << 15)
    result = torch.where(size < 0x7F800000, finite | sign << 15, special)
    return result.to(torch.int32).to(torch.int16).view(dtype)


def words_of(count: int, seed: int, rounds: int, slot: int, stream: int, device: torch.device) -> Tensor:
    """[count] int64: the random 32-bit words for a slot's elements. Four neighbours share a counter."""
    first = torch.arange(slot * count, (slot + 1) * count, 4, device=device)
    return torch.stack(philox(seed, first, rounds, stream), -1).view(-1)


def stored(state: Tensor, dtype: torch.dtype, seed: int, rounds: int, slot: int, stream: int = 0) -> Tensor:
    """A slot's new state [heads, headdim, d_state] in the stored dtype: float16 and bfloat16 with the slot's noise, others to nearest."""
    if not rounds or dtype not in (torch.float16, torch.bfloat16):
        return state.to(dtype)
    return rounded(state.reshape(-1), dtype, words_of(state.numel(), seed, rounds, slot, stream, state.device)).view(state.shape)
