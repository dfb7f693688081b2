"""Stochastic rounding of replayed states on a card: unbiased, the reference's bits, and other numbers in every replay of a graph."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from bits import same
from replay_cases import BF16, F16, F32, HISTORY, I32

import ssmgen
from ssmgen.engine.stochastic_reference import stored

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SLOTS, HEADS, ROWS, COLUMNS = 17, 16, 64, 128  # 2.2 M elements


def exact_sums(dtype: torch.dtype, subnormal: bool) -> tuple[dict[str, Any], torch.Tensor]:
    """(a call, the states that it should round, in float64). f32 holds the sums of states and additions exactly.

    One token counts, dt is 1 and A 0, so each element gets x B more: an eighth to seven eighths of the last place that is kept.
    """
    g = torch.Generator(DEVICE).manual_seed(3)
    sign = 1 - 2 * torch.randint(0, 2, (SLOTS, HEADS, ROWS, COLUMNS), generator=g, device=DEVICE)
    if subnormal:  # of f16: multiples of 2^-24 below 2^-14
        size, last = torch.randint(8, 1000, sign.shape, generator=g, device=DEVICE).double() * 2.0**-24, 2.0**-24
    else:  # of one binade, where the last place is the same for all
        steps = {F16: 2**10, BF16: 2**7}[dtype]
        last = 1 / steps
        size = 1 + torch.randint(1, steps - 1, sign.shape, generator=g, device=DEVICE).double() * last
    state = (sign * size).to(dtype)
    assert torch.equal(state.double(), sign * size)
    eighths = torch.randint(1, 8, (SLOTS, HEADS, ROWS), generator=g, device=DEVICE)
    column = (1 - 2 * torch.randint(0, 2, (SLOTS, COLUMNS), generator=g, device=DEVICE)) * (last / 8)
    exact = state.double() + eighths[..., None] * column[:, None, None]

    def filled(*shape: int, dtype: torch.dtype = F32, value: float = float("nan")) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=DEVICE)

    kwargs: dict[str, Any] = {
        "state": state,
        "old_x": filled(SLOTS, 8, HEADS, ROWS, dtype=F32),
        "old_B": filled(SLOTS, 2, 8, 1, COLUMNS, dtype=F32),
        "old_dt": filled(SLOTS, 2, HEADS, 8),
        "old_dA_cumsum": filled(SLOTS, 2, HEADS, 8),
        "cache_buf_idx": filled(SLOTS, dtype=I32, value=0),
        "prev_num_accepted_tokens": filled(SLOTS, dtype=I32, value=1),
        "x": filled(SLOTS, 1, HEADS, ROWS, value=1),
        "dt": filled(SLOTS, 1, HEADS, value=1),
        "A": filled(HEADS, value=0),
        "B": filled(SLOTS, 1, 1, COLUMNS, value=1),
        "C": filled(SLOTS, 1, 1, COLUMNS, value=1),
    }
    kwargs["old_x"][:, 0], kwargs["old_B"][:, 0, 0, 0] = eighths.float(), column.float()
    kwargs["old_dt"][:, 0, :, 0], kwargs["old_dA_cumsum"][:, 0, :, 0] = 1, 0
    return kwargs, exact


ROUNDED = pytest.mark.parametrize(("dtype", "subnormal"), [(F16, False), (F16, True), (BF16, False)], ids=["f16", "f16-subnormal", "bf16"])


@ROUNDED
@pytest.mark.parametrize("per_slot", [False, True], ids=["one-seed", "seed-per-slot"])
def test_stochastic_rounding_is_unbiased_and_has_the_reference_s_bits(dtype, subnormal, per_slot):
    kwargs, exact = exact_sums(dtype, subnormal)
    last = 2.0**-24 if subnormal else {F16: 2.0**-10, BF16: 2.0**-7}[dtype]
    nearest = {n: t.clone() for n, t in kwargs.items()}
    ssmgen.replay_selective_state_update(**nearest)
    assert torch.equal(nearest["state"], exact.float().to(dtype)), "the sums are exact"
    seeds = torch.arange(SLOTS if per_slot else 1, device=DEVICE) * 2**40 + 11
    ssmgen.replay_selective_state_update(**kwargs, rand_seed=seeds)
    state = kwargs["state"]
    for slot in range(SLOTS):
        seed = int(seeds[slot if per_slot else 0])
        assert same(state[slot], stored(exact[slot].float(), dtype, seed, 10, slot)), f"slot {slot}"
    error = (state.double() - exact) / last
    n = error.numel()
    assert n >= 2_000_000 and (error.abs() < 1).all()
    # Away from zero or towards it, with a standard deviation below half a place: five of the mean's. To nearest would be far off for
    # each number of eighths.
    assert error.mean().abs() <= 2.5 / n**0.5 and (error * exact.sign()).mean().abs() <= 2.5 / n**0.5
    eighths = ((exact - nearest["state"].double()) / last * 8).round()
    for number in eighths.unique().tolist():
        some = error[eighths == number]
        assert some.mean().abs() <= 2.5 / len(some) ** 0.5, f"{number} eighths"
    assert abs((nearest["state"].double() - exact)[eighths == 1].mean() / last) > 0.1


def test_each_replay_of_a_graph_draws_fresh_numbers():
    """The kernel counts its slots' seeds, so the host has nothing to do between replays."""
    kwargs, exact = exact_sums(F16, False)
    first, seeds = kwargs["state"].clone(), torch.arange(SLOTS, device=DEVICE) * 1000
    more = {"rand_seed": seeds, "arrivals": torch.zeros(SLOTS, dtype=I32, device=DEVICE), "out": torch.empty_like(kwargs["x"])}
    old = {n: kwargs[n].clone() for n in HISTORY}
    ssmgen.warm(ssmgen.replay_selective_state_update, **kwargs, **more)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for name, t in (*old.items(), ("state", first)):
            kwargs[name].copy_(t)
        kwargs["cache_buf_idx"].fill_(0)
        kwargs["prev_num_accepted_tokens"].add_(1)
        ssmgen.replay_selective_state_update(**kwargs, **more)
    kwargs["prev_num_accepted_tokens"].zero_()
    seen = []
    for i in range(4):
        graph.replay()
        torch.cuda.synchronize()
        for slot in (0, 5, SLOTS - 1):
            assert same(kwargs["state"][slot], stored(exact[slot].float(), F16, slot * 1000 + i, 10, slot))
        assert (seeds == torch.arange(SLOTS, device=DEVICE) * 1000 + i + 1).all() and not more["arrivals"].any()
        assert (kwargs["cache_buf_idx"] == 1).all() and not kwargs["prev_num_accepted_tokens"].any()
        seen.append(kwargs["state"].clone())
    assert all((a != b).float().mean() > 0.1 for a, b in pairwise(seen))
