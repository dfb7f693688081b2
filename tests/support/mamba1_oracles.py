"""Mamba-1 over prompts in the form of drop-in calls: operands, and the expected results token by token in float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from engine_calls import pages
from prompt_oracles import BF16, F32, randn, starts_of
from torch import Tensor
from torch.nn.functional import silu, softplus

D, N = 12, 5
LENGTHS = (17, 0, 1, 40, 6)
TOKENS = sum(LENGTHS)
SLOTS = torch.tensor([5, 1, 3, 7, 2], dtype=torch.int32)


def by_tokens(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    """[…, D, T] as after a projection: the channels of one token are contiguous."""
    return randn(*shape[:-2], shape[-1], shape[-2], seed=seed, dtype=dtype).transpose(-1, -2)


def operands(*lead: int, T: int, G: int | None = None, make=by_tokens, dtype: torch.dtype = BF16, **more) -> dict:
    """Rows [*lead, D, T]; G None: no group axis."""
    groups = () if G is None else (G,)
    call = {n: make(*lead, D, T, seed=seed, dtype=dtype) for seed, n in enumerate(("u", "delta", "z"))}
    call |= {n: make(*lead, *groups, N, T, seed=seed, dtype=dtype) for seed, n in enumerate(("B", "C"), 3)}
    call |= {"A": -randn(D, N, seed=5, dtype=F32).exp(), "D": randn(D, seed=6, dtype=F32), "delta_bias": randn(D, seed=7, dtype=F32)}
    return call | {"delta_softplus": True} | more


def walk(call: dict, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One row [D, T] token by token: (y [D, T], the state after it [D, N]), in float64."""
    u, delta, A, B, C = (call[n].double() for n in ("u", "delta", "A", "B", "C"))
    B, C = (t[None] if t.dim() == 2 else t for t in (B, C))
    B, C = (t.repeat_interleave(D // t.shape[0], 0) for t in (B, C))
    bias, skip, z = (call.get(n) for n in ("delta_bias", "D", "z"))
    d = delta if bias is None else delta + bias.double()[:, None]
    d = softplus(d) if call["delta_softplus"] else d
    h, y = torch.zeros(D, N, dtype=torch.float64) if state is None else state.double(), torch.empty_like(u)
    for t in range(u.shape[1]):
        h = torch.exp(d[:, t, None] * A) * h + (d[:, t] * u[:, t])[:, None] * B[..., t]
        y[:, t] = (h * C[..., t]).sum(-1)
    y = y if skip is None else y + skip.double()[:, None] * u
    return y if z is None else y * silu(z.double()), h


def part(call: dict, *, row: int | None = None, span: slice = slice(None)) -> dict:
    """A row of a batch, or some tokens of packed ones."""
    per_token = ("u", "delta", "z", "B", "C")
    return {n: (t if row is None else t[row])[..., span] if n in per_token and t is not None else t for n, t in call.items()}


def sequences(call: dict, lengths=LENGTHS) -> list[dict]:
    starts = starts_of(lengths).tolist()
    return [part(call, span=slice(a, b)) for a, b in pairwise(starts)]


def by_channels(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return randn(*shape, seed=seed, dtype=dtype)


def vllm_call(lengths=LENGTHS, **more) -> dict:
    tokens = sum(lengths)
    call = operands(T=tokens, G=None) | {"ssm_states": pages(9, D, N), "query_start_loc": starts_of(lengths), "cache_indices": SLOTS}
    return call | {"cu_chunk_seqlen": SLOTS, "last_chunk_indices": SLOTS} | more
