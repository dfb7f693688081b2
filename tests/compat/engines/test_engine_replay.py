"""vLLM's ReplaySSM on ssmgen's ring: many steps and drafts with vLLM's own bookkeeping, against single steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_conv import randn

import ssmgen
from ssmgen.compat import vllm
from ssmgen.compat.shared import noise
from ssmgen.compat.vllm import replay
from ssmgen.errors import ArgumentError

I32 = torch.int32
H, P, N, G, SLOTS, WINDOW = 4, 16, 32, 2, 7, 5
SLOT = torch.tensor([5, 0, 2], dtype=I32)  # the second row is padding: slot 0 is vLLM's null block
A, D, BIAS = -randn(H).abs(), randn(H), randn(H, seed=1)
WEIGHTS = {"A": A[:, None, None].expand(H, P, N), "D": D[:, None].expand(H, P), "dt_bias": BIAS[:, None].expand(H, P)}


def ring(entries: int) -> dict[str, Tensor]:
    """Tensors as vLLM lays them out, with NaN where nothing was stored yet."""
    made = {"x_cache": torch.full((SLOTS, H, entries, P), torch.nan), "B_cache": torch.full((SLOTS, G, entries, N), torch.nan)}
    made |= {"dt_cache": torch.full((SLOTS, H, entries), torch.nan)}
    return made | {n: torch.zeros(SLOTS, dtype=I32) for n in ("ring_start", "prev_num_accepted_tokens", "prev_query_len")}


def tokens(seed: int, *lead: int) -> dict[str, Tensor]:
    made = {"x": randn(*lead, H, P, seed=seed), "B": randn(*lead, G, N, seed=seed + 1), "C": randn(*lead, G, N, seed=seed + 2)}
    return made | {"dt": randn(*lead, H, seed=seed + 3)[..., None].expand(*lead, H, P)}


def advance(given: dict[str, Tensor], counted: int, accepted: int, slots: list[int]) -> None:
    """vLLM's trackers after a step of `counted` tokens of which `accepted` count; see its _update and _commit kernels."""
    entries = given["x_cache"].shape[2]
    for slot in slots:
        start, prev = int(given["ring_start"][slot]), int(given["prev_num_accepted_tokens"][slot])
        if prev + counted > WINDOW:
            given["ring_start"][slot], prev = (start + prev) % entries, 0
        given["prev_num_accepted_tokens"][slot] = prev + accepted


def step(state: Tensor, given: dict[str, Tensor], token: dict[str, Tensor], **more: Any) -> Tensor:
    out = torch.full(token["x"].shape, torch.nan)
    more = {"update_trackers": False, "state_batch_indices": SLOT[:, None]} | more
    found = vllm.selective_state_update_replayssm_flashinfer(
        state, **token, **WEIGHTS, out=out, logical_window=WINDOW, dt_softplus=True, **given, **more
    )
    assert found is out
    return out


def single(state: Tensor, token: dict[str, Tensor]) -> Tensor:
    given = {"A": A, "D": D, "dt_bias": BIAS, "dt_softplus": True, "state_indices": SLOT, "pad_slot_id": 0}
    return ssmgen.selective_state_update(state, **token, **given)


def test_steps_are_single_steps():
    state, given = randn(SLOTS, H, P, N, seed=3), ring(WINDOW + 1)
    exact, written, before = state.clone(), 0, state.clone()
    for t in range(3 * WINDOW + 2):
        token, old = tokens(10 * t, 3), state.clone()
        got, want = step(state, given, token), single(exact, token)
        assert torch.allclose(got[[0, 2]], want[[0, 2]], rtol=1e-4, atol=1e-4) and not got[1].any()
        written += int(not torch.equal(old, state))
        advance(given, 1, 1, [5, 2])
    assert written == 3, "the state is written once per window"
    assert torch.equal(state[[0, 1, 3, 4, 6]], before[[0, 1, 3, 4, 6]])


@pytest.mark.parametrize("packed", [False, True])
def test_drafts_continue_from_the_accepted_tokens(packed):
    T = 3
    state, given, g = randn(SLOTS, H, P, N, seed=3), ring(WINDOW + T), torch.Generator().manual_seed(0)
    exact = state.clone()
    for t in range(9):
        token = tokens(10 * t, 3, T)
        flat = {n: v.flatten(0, 1) for n, v in token.items()} if packed else token
        more = {"cu_seqlens": torch.arange(4, dtype=I32) * T, "max_seqlen": T} if packed else {}
        got = step(state, given, flat, **more).view(3, T, H, P)
        accepted = int(torch.randint(1, T + 1, (1,), generator=g))
        for i in range(T):
            after = exact.clone()
            want = single(after, {n: v[:, i] for n, v in token.items()})
            assert torch.allclose(got[[0, 2], i], want[[0, 2]], rtol=1e-4, atol=1e-4)
            exact = after
            if i + 1 == accepted:
                kept = after.clone()
        exact = kept
        advance(given, T, accepted, [5, 2])


def test_the_engine_s_kernel_moves_the_ring(monkeypatch):
    moved: list[Any] = []

    class Engine:
        @staticmethod
        def update_replayssm_ring_trackers(*tensors: Tensor, **how: Any) -> None:
            moved.append((tensors, how))

    monkeypatch.setattr(replay, "import_module", lambda name: Engine)
    given = ring(WINDOW + 1)
    step(randn(SLOTS, H, P, N), given, tokens(1, 3), update_trackers=True)
    ((tensors, how),) = moved
    assert all(a is given[n] for a, n in zip(tensors, ("ring_start", "prev_num_accepted_tokens", "prev_query_len"), strict=False))
    assert torch.equal(tensors[3], SLOT) and how == {"logical_window": WINDOW, "ring_buffer_len": WINDOW + 1, "pad_slot_id": 0}


@pytest.mark.parametrize("asked", ["flag", "variable"])
def test_written_states_are_rounded_with_noise(asked, monkeypatch):
    monkeypatch.setenv("SSMGEN_ENGINE_NOISE", "12" if asked == "variable" else "0")
    noise.rounds.cache_clear()
    states = []
    for seed in (1, 2, 1):
        monkeypatch.setattr(noise.torch, "randint", lambda *_, seed=seed, **__: torch.tensor([seed]))
        state, given = randn(SLOTS, H, P, N, seed=3).half(), ring(WINDOW + 1)
        for t in range(WINDOW + 1):
            step(state, given, tokens(10 * t, 3), enable_stochastic_rounding=asked == "flag")
            advance(given, 1, 1, [5, 2])
        states.append(state)
    noise.rounds.cache_clear()
    assert torch.equal(states[0], states[2]) and not torch.equal(states[0], states[1])


def test_says_what_is_wrong():
    given = ring(WINDOW + 1)
    with pytest.raises(ArgumentError, match=r"x_cache is \[4, 6, 16\] and B_cache"):
        step(randn(SLOTS, H, P, N), given | {"x_cache": given["x_cache"][0]}, tokens(1, 3))
