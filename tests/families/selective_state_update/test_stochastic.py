"""Stochastic rounding: its noise and its effect on numbers, in plain PyTorch and in the kernels' text through the emulator."""

from __future__ import annotations

import pytest
import torch
from emulated_calls import needs_emulator
from selection import costly
from ssu_cases import BF16, F16, F32, ulp
from torch import Tensor

from ssmgen.compile.render import environment
from ssmgen.emulator import run_source
from ssmgen.engine.stochastic_reference import philox, rounded
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import KernelSpec, Needs, Param

SEEDS = [0, 42, 123456, 2**31 - 1, -1, 0x0123456789ABCDEF]
COUNTERS = [0, 4, 2**31 - 4, 2**32 - 4, 2**32, 2**32 + 8, 5 * 2**40 + 12, 2**62]
LARGEST = {F16: 65504.0, BF16: torch.finfo(BF16).max}


def python_philox(seed: int, counter: int, rounds: int, stream: int = 0) -> list[int]:
    """Philox as its paper writes it."""
    low = 0xFFFFFFFF
    key, words = [seed & low, seed >> 32 & low], [counter & low, counter >> 32, stream, 0]
    for _ in range(rounds):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b >> 32 ^ words[1] ^ key[0], b & low, a >> 32 ^ words[3] ^ key[1], a & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return words


def test_philox_is_random123_s():
    """The known answers of Random123 for zeros, and for ones in seed and counter (of which we take the low half)."""
    assert python_philox(0, 0, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("rounds", [1, 4, 10])
@pytest.mark.parametrize("seed", SEEDS)
def test_reference_philox(seed, rounds):
    for stream in (0, 1, 17):
        found = torch.stack(philox(seed, torch.tensor(COUNTERS), rounds, stream), -1).tolist()
        assert found == [python_philox(seed, counter, rounds, stream) for counter in COUNTERS]


# The rounding.


def neighbours(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of two neighbours of `dtype`, around each value, in float64."""
    return ulp(values.double(), dtype)


def words(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2**32, (n,), generator=torch.Generator().manual_seed(seed))


def magnitudes(n: int, low: int, high: int, seed: int = 0) -> Tensor:
    """Numbers of both signs, uniform over the powers 2^low … 2^high."""
    g = torch.Generator().manual_seed(seed)
    power = torch.rand(n, generator=g, dtype=torch.float64) * (high - low) + low
    return (torch.exp2(power) * (torch.randint(0, 2, (n,), generator=g) * 2 - 1)).float()


RANGES = {
    "f16": (F16, -14, 15), "f16-subnormal": (F16, -24, -14), "f16-below-the-least": (F16, -31, -24),
    "bf16": (BF16, -100, 100), "bf16-subnormal": (BF16, -132, -126),
}  # fmt: skip


@costly(2)
@pytest.mark.parametrize("name", RANGES)
def test_unbiased(name):
    """Over 2^21 numbers, in units of the last place: the mean error fits a sum of that number of errors with variance below 1/4."""
    dtype, low, high = RANGES[name]
    parts, n = 16, 2**17
    up, away = 0.0, 0.0  # sums of errors: towards plus infinity, and away from zero
    for part in range(parts):
        values = magnitudes(n, low, high, seed=2 * part)
        error = (rounded(values, dtype, words(n, 2 * part + 1)).double() - values.double()) / neighbours(values, dtype)
        assert error.abs().max() < 1
        up, away = up + float(error.sum()), away + float((error * values.sign()).sum())
    assert abs(up) < 5 * 0.5 * (parts * n) ** 0.5 and abs(away) < 5 * 0.5 * (parts * n) ** 0.5


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_each_number_by_itself_is_unbiased(dtype):
    """The mean of 2^18 roundings of one number: within five deviations."""
    n = 2**18
    for value in (1.0009, -3.1415927, 2.0**-14 * 1.0003, 6.1e-5, 3.3e-7, 5.96e-8, 1e-8, 65503.0 if dtype == F16 else 1e38):
        value = torch.tensor(value)
        step = float(neighbours(value, dtype))
        found = rounded(value.expand(n), dtype, words(n, 2)).double()
        assert len(found.unique()) <= 2
        assert abs(float(found.mean() - value.double())) <= 5 * 0.5 * step / n**0.5 + 1e-9 * step


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_what_is_representable_stays(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[~every.isnan()]
    for word in (0, 0x1FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF):
        again = rounded(every.float(), dtype, torch.full((len(every),), word))
        assert torch.equal(again.view(torch.int16), every.view(torch.int16))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_finite_stays_finite_and_the_rest_is_kept(dtype):
    huge = torch.tensor([LARGEST[dtype] * (1 + 2.0**-12), -LARGEST[dtype] * (1 + 2.0**-12), torch.finfo(F32).max, -torch.finfo(F32).max])
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), -float("nan")])
    for word in (0, 0xFFFFFFFF):
        assert rounded(huge, dtype, torch.full((4,), word)).double().abs().eq(LARGEST[dtype]).all()
        kept = rounded(special, dtype, torch.full((4,), word))
        assert kept[0] == float("inf") and kept[1] == -float("inf") and kept[2:].isnan().all()


# The kernels' text.


class Rounding(KernelSpec):
    """Rounds n numbers with one word each, and draws the noise of n counters."""

    def parameters(self) -> list[Param]:
        pointers = [("values", "f32", True), ("words", "u32", True), ("seeds", "i64", True), ("counters", "i64", True)]
        out = [("noise", "u32", False), ("fours", "u32", False)]
        return [*(Param.pointer(*p) for p in pointers + out), Param.u32("n"), Param.u32("stream")]


TEXT = """
{% include "lib/types.cuh.j2" %}
constexpr int kPhiloxRounds = {{ rounds }};
{% include "lib/ptx.cuh.j2" %}
{% include "lib/memory.cuh.j2" %}
{% include "lib/stochastic.cuh.j2" %}
extern "C" __global__ void rounding(
    const f32* values, const u32* words, const i64* seeds, const i64* counters, u32* noise, u32* fours, u32 n, u32 stream) {
  const u32 i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  const u64 counter[1] = {u64(load(counters + i))};
  u32 drawn[1][4];
  philox(load(seeds + i), counter, stream, drawn);
  store_4xu32(noise + 4 * i, drawn[0]);
  if (i % 4 != 0 || i + 4 > n) return;
  float four[4];
  u32 random[4], pairs[2];
  for (u32 j = 0; j < 4; ++j) four[j] = load(values + i + j), random[j] = load_u32(words + i + j);
  round_4_stochastic(f16{}, four, random, pairs);
  for (u32 j = 0; j < 4; ++j) store_u32(fours + 2 * (i + j), pairs[j / 2] >> j % 2 * 16 & 0xffffu);
  for (u32 j = 0; j < 4; ++j) {  // a NaN of arithmetic is quiet
    if (four[j] != four[j]) four[j] = __uint_as_float(__float_as_uint(four[j]) | 0x400000u);
  }
  round_4_stochastic(bf16{}, four, random, pairs);
  for (u32 j = 0; j < 4; ++j) store_u32(fours + 2 * (i + j) + 1, pairs[j / 2] >> j % 2 * 16 & 0xffffu);
}
"""


def run_kernel(values: Tensor, random: Tensor, seeds: Tensor, counters: Tensor, rounds: int, stream: int) -> tuple[Tensor, ...]:
    """(noise, bits of both types) as int64"""
    n, names, outputs = len(values), ("f16", "bf16"), ("noise", "fours")
    nothing = {"needs": Needs()} | dict.fromkeys(("clusters", "waits", "triggers"), False)
    source = environment().from_string(TEXT).render(dtypes=names, rounded=names, rounds=rounds, **nothing)
    operands = {"values": values, "words": random.to(torch.int32), "seeds": seeds, "counters": counters}
    operands |= {name: torch.zeros(n, *more, dtype=torch.int32) for name, more in (("noise", (4,)), ("fours", (2,)))}
    packed = Arguments(Rounding(), {"n": n, "stream": stream}).at([t.data_ptr() for t in operands.values()])
    run_source(source, "rounding", -(-n // 256), 256, packed, operands, outputs)
    return tuple(operands[name].long() & 0xFFFFFFFF for name in outputs)


def everything(n: int) -> Tensor:
    """Every kind of f32: random bits, numbers near the edges of both types, infinities and NaN."""
    bits = words(n, 5)
    edges = [0.0, 65504.0, 65519.9, 65520.0, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-55, 2.0**-56, 2.0**-126, 2.0**-149, 3.4e38, 1.0]
    near = torch.tensor(edges).view(torch.int32).long()[:, None] + torch.arange(-3, 4)
    special = torch.tensor([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
    positive = torch.cat([near.flatten().clamp(min=0), special])
    bits = torch.cat([bits, positive, positive + 2**31]).to(torch.int32)
    return torch.cat([bits.view(F32), magnitudes(n, -60, -14, 6), magnitudes(n, -14, 17, 7)])


@needs_emulator
@pytest.mark.parametrize("rounds", [1, 4, 10])
def test_kernels_agree_with_the_reference(rounds):
    """Bit for bit; NaN is NaN."""
    values = everything(6000)
    n = len(values) // 4 * 4
    values = values[:n]
    random = words(n, 8)
    random[::3], random[1::7] = 0xFFFFFFFF, 0
    seeds = torch.tensor(SEEDS)[torch.arange(n) % len(SEEDS)]
    counters = torch.tensor(COUNTERS)[torch.arange(n) // len(SEEDS) % len(COUNTERS)]
    noise, fours = run_kernel(values, random, seeds, counters, rounds, 3)
    for found, dtype in ((fours[:, 0], F16), (fours[:, 1], BF16)):
        assert torch.equal(found, rounded(values, dtype, random).view(torch.int16).long() & 0xFFFF)
    assert torch.equal(noise, torch.stack(philox(seeds, counters, rounds, 3), -1))
