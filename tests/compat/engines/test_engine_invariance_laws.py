"""The law of batch invariance, of vLLM's own calls: a random batch of sequences, in a scheduler's random pieces and in any order, has the
bits of each sequence alone; and controls, which break it when one of the conditions is dropped.

Prompts run in the emulator, decode steps by the references on the CPU.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import prompt_cases
import pytest
import scan_cases
import selective_cases
import torch
from emulated_calls import needs_emulator
from engine_calls import no_call_goes_to_the_engine, vllm_functions  # noqa: F401
from torch import Tensor

from ssmgen.compat.shared import delta_prompts, invariance, mamba1_prompts, mamba_prompts
from ssmgen.compat.vllm import delta as vllm_delta

pytestmark = needs_emulator
BF16, F32 = torch.bfloat16, torch.float32
H, P, N, K, V = 2, 16, 32, 32, 16
STEPS = 3  # decode steps after each prompt


def randn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Kind:
    """A kind of layer: its tokens' operands {name: shape of a token}, its state, and vLLM's calls of it.

    prompt: (engine, operands of packed tokens, starts, slots, pool) -> outputs; step: the same of one token per sequence, or None
    """

    rows: dict[str, tuple[int, ...]]
    state: tuple[int, ...]
    prompt: Callable[..., Tensor]
    step: Callable[..., Tensor] | None
    grid: int = 64


# Decays near 1, so that a state counts for many tokens.
A, BIAS = -0.01 * (1 + randn(H, seed=3, dtype=F32).abs()), randn(H, seed=5, dtype=F32)
CONSTANT = {"A_log": randn(H, seed=7, dtype=F32) / 4 - 5, "D": randn(H, seed=4, dtype=F32)}


def mamba2_prompt(engine: Any, x: dict[str, Tensor], starts: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    out = torch.empty_like(x["x"])
    engine.mamba_chunk_scan_combined_varlen(
        x["x"], x["dt"], A, x["B"], x["C"], 64, starts, None, None, None, out, D=CONSTANT["D"], dt_bias=BIAS, dt_softplus=True,
        initial_states=pool[slots.long()], state_dtype=pool.dtype, final_states_out=pool, final_state_indices=slots,
    )  # fmt: skip
    return out


def mamba2_step(engine: Any, x: dict[str, Tensor], slots: Tensor, pool: Tensor) -> Tensor:
    out, wide = torch.empty_like(x["x"]), (slice(None), slice(None), None)
    engine.selective_state_update(
        pool, x["x"], x["dt"][wide].expand(-1, -1, P), A[:, None, None].expand(-1, P, N), x["B"], x["C"],
        CONSTANT["D"][:, None].expand(-1, P), BIAS[:, None].expand(-1, P), dt_softplus=True, state_batch_indices=slots, out=out,
    )  # fmt: skip
    return out


def gdn_prompt(engine: Any, x: dict[str, Tensor], starts: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    g = -CONSTANT["A_log"].exp() * torch.nn.functional.softplus(x["a"].float() + BIAS)
    out, last = engine.chunk_gated_delta_rule(
        *(x[n][None] for n in "qkv"), g[None], x["b"].float().sigmoid()[None], initial_state=pool[slots.long()], output_final_state=True,
        cu_seqlens=starts, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    pool[slots.long()] = last.to(pool.dtype)
    return out[0]


def gdn_step(engine: Any, x: dict[str, Tensor], slots: Tensor, pool: Tensor) -> Tensor:
    mixed, out = torch.cat([x[n].flatten(1) for n in "qkv"], 1), x["v"].new_empty(x["v"].shape[0], 1, H, V)
    engine.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, x["a"], x["b"], CONSTANT["A_log"], BIAS, K**-0.5, pool, out, slots, use_qk_l2norm_in_kernel=True
    )
    return out[:, 0]


def kda_prompt(engine: Any, x: dict[str, Tensor], starts: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    out, last = engine.chunk_kda_with_fused_gate(
        *(x[n][None] for n in ("q", "k", "v", "g", "b")), CONSTANT["A_log"], None, initial_state=pool[slots.long()],
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=starts,
    )  # fmt: skip
    pool[slots.long()] = last.to(pool.dtype)
    return out[0]


def kda_step(engine: Any, x: dict[str, Tensor], slots: Tensor, pool: Tensor) -> Tensor:
    mixed = torch.cat([x[n].flatten(1) for n in "qkv"], 1)
    out, _ = engine.fused_recurrent_kda_packed_decode(mixed, x["g"][None], x["b"][None], CONSTANT["A_log"], None, None, pool, slots)
    return out[0]


def mamba1_prompt(engine: Any, x: dict[str, Tensor], starts: Tensor, slots: Tensor, pool: Tensor) -> Tensor:
    D = x["u"].shape[1]
    out = engine.selective_scan_fn(
        x["u"].t(), pool, x["delta"].t(), -randn(D, N, seed=11, dtype=F32).abs(), x["B"].t(), x["C"].t(), randn(D, seed=12, dtype=F32),
        x["z"].t(), randn(D, seed=13, dtype=F32), delta_softplus=True, query_start_loc=starts, cache_indices=slots,
        has_initial_state=torch.ones(len(slots), dtype=torch.bool),
    )  # fmt: skip
    return out.t()


DELTA = {"q": (H, K), "k": (H, K), "v": (H, V), "b": (H,)}
KINDS = {
    "mamba2": Kind({"x": (H, P), "dt": (H,), "B": (1, N), "C": (1, N)}, (H, P, N), mamba2_prompt, mamba2_step),
    "gdn": Kind(DELTA | {"a": (H,)}, (H, V, K), gdn_prompt, gdn_step),
    "kda": Kind(DELTA | {"g": (H, K), "v": (H, 32)}, (H, 32, K), kda_prompt, kda_step),
    "mamba1": Kind({"u": (24,), "delta": (24,), "z": (24,), "B": (N,), "C": (N,)}, (24, N), mamba1_prompt, None, grid=4),
}


@pytest.fixture(autouse=True)
def in_the_emulator(monkeypatch):
    """The mode is on, and prompts run as their kernels do."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")

    def by(module: Any, name: str, run: Callable[..., Any]) -> None:
        original = getattr(module, name)
        names = list(inspect.signature(original).parameters)

        @functools.wraps(original)
        def emulated(*args: Any, **more: Any) -> Any:
            assert more.pop("segments") in (1, 2), "a sequence may be divided by its length"
            return run(segments=SEGMENTS.number, **dict(zip(names, args, strict=False)), **more)

        monkeypatch.setattr(module, name, emulated)

    by(mamba_prompts, "chunk_scan", scan_cases.emulated)
    by(delta_prompts, "chunk_gated_delta_rule", functools.partial(prompt_cases.emulated, prompt_cases.Case("chunk_gated_delta_rule")))
    by(vllm_delta, "_chunk_kda", functools.partial(prompt_cases.emulated, prompt_cases.Case()))
    by(mamba1_prompts, "selective_scan", selective_cases.emulated)


SEGMENTS = SimpleNamespace(number=1)  # of a call in the emulator; a control takes 2


def tokens_of(kind: Kind, lengths: list[int]) -> list[dict[str, Tensor]]:
    return [
        {n: randn(length + STEPS, *shape, seed=97 * i + j) for j, (n, shape) in enumerate(kind.rows.items())}
        for i, length in enumerate(lengths)
    ]


def run(engine: Any, kind: Kind, tokens: list[dict[str, Tensor]], steps: list[list[tuple[int, int, int]]], dtype: torch.dtype = F32):
    """(outputs of each sequence, states). steps: [[(sequence, start, end) of each piece]]; after the prompt, pieces are one token long."""
    pool = torch.zeros(len(tokens) + 1, *kind.state, dtype=dtype)  # slot 0 is padding
    outputs: list[list[Tensor]] = [[] for _ in tokens]
    for pieces in steps:
        prompts = [p for p in pieces if p[1] < len(next(iter(tokens[p[0]].values()))) - STEPS]
        for these, call in ((prompts, kind.prompt), ([p for p in pieces if p not in prompts], kind.step)):
            if not these:
                continue
            x = {n: torch.cat([tokens[i][n][start:end] for i, start, end in these]) for n in kind.rows}
            slots = torch.tensor([i + 1 for i, *_ in these], dtype=torch.int32)
            starts = torch.tensor([0, *(end - start for _, start, end in these)]).cumsum(0).int()
            assert call is not None
            out = call(engine, x, starts, slots, pool) if call is kind.prompt else call(engine, x, slots, pool)
            for (i, *_), o in zip(these, out.split(starts.diff().tolist()), strict=True):
                outputs[i].append(o)
    return [torch.cat(o) if o else torch.empty(0) for o in outputs], pool[1:]


def scheduled(rng: random.Random, lengths: list[int], grid: int, steps: int, cut: int = 0) -> list[list[tuple[int, int, int]]]:
    """Random pieces in a random order, of random budgets. cut: the control's multiple, instead of the grid and its rule of one token."""
    at, found = [0] * len(lengths), []
    while any(a < n + steps for a, n in zip(at, lengths, strict=True)):
        budget, pieces = rng.randrange(grid + 1, 2 * grid + 3), []
        for i in rng.sample(range(len(lengths)), len(lengths)):
            whole, limit = lengths[i] + steps, at[i] + budget
            end = min(limit, lengths[i] if at[i] < lengths[i] else min(at[i] + 1, whole))
            if cut and end < lengths[i]:
                end = max(at[i] + (end - at[i]) // cut * cut, at[i])
            elif not cut:
                end = invariance.piece_end(at[i], min(limit, whole), limit, lengths[i], grid)
            if end > at[i] and rng.random() < 0.8:
                pieces.append((i, at[i], end))
                budget -= end - at[i]
                at[i] = end
        found += [pieces] if pieces else []
    return found


def alone(lengths: list[int], i: int, steps: int) -> list[list[tuple[int, int, int]]]:
    return [[(i, 0, lengths[i])], *([(i, lengths[i] + t, lengths[i] + t + 1)] for t in range(steps))]


def differences(
    engine: Any, name: str, seed: int, lengths: tuple[int, ...], dtype: torch.dtype = F32, cut: int = 0, segments: int = 1
) -> list[str]:
    """The sequences whose outputs or states have other bits alone than in the batch."""
    kind, rng = KINDS[name], random.Random(seed)
    steps = 0 if kind.step is None else STEPS
    tokens = tokens_of(kind, list(lengths))
    SEGMENTS.number = segments
    try:
        together, states = run(engine, kind, tokens, scheduled(rng, list(lengths), kind.grid, steps, cut), dtype)
        words = []
        for i in range(len(lengths)):
            by_itself, state = run(engine, kind, tokens, alone(list(lengths), i, steps), dtype)
            words += [f"outputs of {lengths[i]}"] * (not torch.equal(together[i], by_itself[i]) if by_itself[i].numel() else 0)
            words += [f"states of {lengths[i]}"] * (not torch.equal(states[i], state[i]))
    finally:
        SEGMENTS.number = 1
    return words


LONG = 330  # a sequence that two segments after its first part can share
LENGTHS = {name: (1, 65, 129, 130) if kind.grid == 64 else (1, 5, 9, 22) for name, kind in KINDS.items()}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", KINDS)
def test_a_batch_has_the_bits_of_each_sequence_alone(vllm, name, seed):
    assert differences(vllm, name, seed, LENGTHS[name]) == []


@pytest.mark.parametrize(
    ("dropped", "names"),
    [({"dtype": BF16}, ("mamba2", "gdn", "kda")), ({"cut": 63}, ("mamba2", "gdn", "kda")), ({"segments": 2}, ("gdn", "kda"))],
    ids=["16-bit-pool", "cut-at-63", "segments"],
)
def test_each_condition_is_needed(vllm, dropped, names):
    for name in names:
        assert differences(vllm, name, 0, (LONG,), **dropped), name
