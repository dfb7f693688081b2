"""vLLM's ReplaySSM with the Triton backend: many steps with the positions and flags of vLLM's scheduler, against single steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engine_replay import BIAS, SLOT, SLOTS, WEIGHTS, G, H, N, P, single, tokens
from torch import Tensor
from torch_conv import randn

from ssmgen.compat import vllm
from ssmgen.compat.shared import noise
from ssmgen.errors import ArgumentError

I8, I32 = torch.int8, torch.int32
LENGTH = 4  # of the cache
LIVE = [0, 2]  # rows; the other one is padding


def cache(length: int = LENGTH) -> dict[str, Tensor]:
    """Tensors as vLLM lays them out, with NaN where nothing was stored yet."""
    made = {"x_cache": torch.full((SLOTS, H, length, P), torch.nan), "B_cache": torch.full((SLOTS, G, length, N), torch.nan)}
    return made | {"dt_cache": torch.full((SLOTS, H, length), torch.nan)}


def step(state: Tensor, kept: dict[str, Tensor], token: dict[str, Tensor], at: list[int], flush: list[bool], **more: Any) -> Tensor:
    """The tables have a row to spare."""
    out = torch.full(token["x"].shape, torch.nan)
    given: dict[str, Any] = {"write_pos": torch.tensor([*at, 99], dtype=I32), "is_flush": torch.tensor([*flush, True]).to(I8)}
    given |= {"state_batch_indices": torch.cat([SLOT, SLOT[:1]])[:, None], "bc_pre": torch.zeros(3, G, LENGTH), "max_cache_len": LENGTH}
    found = vllm.selective_state_update_replayssm_output_only(state, **token, **WEIGHTS, dt_softplus=True, out=out, **kept, **given | more)
    assert found is out
    return out


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("forced", [(), (1, 2, 7)], ids=["full", "block ends"])
def test_steps_are_single_steps(gated, forced):
    """Written states are those of single steps; the cache's other entries, and all other slots, keep their bits."""
    state, kept, at, written = randn(SLOTS, H, P, N, seed=3), cache(), 0, 0
    exact, before = state.clone(), state.clone()
    for t in range(11):
        token = tokens(10 * t, 3)
        z = {"z": randn(3, H, P, seed=t)} if gated else {}
        flush = at == LENGTH - 1 or t in forced
        old, was = {n: v.clone() for n, v in kept.items()}, state.clone()
        got, want = step(state, kept, token, [at, 0, at], [flush] * 3, **z), single(exact, token | z)
        assert torch.allclose(got[LIVE], want[LIVE], rtol=1e-4, atol=1e-4) and not got[1].any()
        if flush:
            assert torch.allclose(state[[5, 2]], exact[[5, 2]], rtol=1e-4, atol=1e-4)
            assert all(torch.equal(kept[n].nan_to_num(7.0), v.nan_to_num(7.0)) for n, v in old.items())
        else:
            assert torch.equal(state, was)
            assert torch.equal(kept["x_cache"][5, :, at], token["x"][0]) and torch.equal(kept["B_cache"][2, :, at], token["B"][2])
            assert torch.allclose(kept["dt_cache"][5, :, at], torch.nn.functional.softplus(token["dt"][0, :, 0] + BIAS))
        at, written = 0 if flush else at + 1, written + flush
    assert written >= 2 and torch.equal(state[[0, 1, 3, 4, 6]], before[[0, 1, 3, 4, 6]])


def test_a_token_left_of_a_prompt_writes_its_state_at_once():
    """Nothing of the cache is read, whatever it holds. The other sequence has its own position."""
    state, kept, token = randn(SLOTS, H, P, N, seed=3), cache(), tokens(1, 3)
    exact = state.clone()
    got, want = step(state, kept, token, [0, 0, 0], [True, False, False]), single(exact, token)
    assert torch.allclose(got[LIVE], want[LIVE], rtol=1e-4, atol=1e-4)
    assert torch.allclose(state[5], exact[5], rtol=1e-4, atol=1e-4) and not torch.allclose(state[2], exact[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asked", ["flag", "variable"])
def test_written_states_are_rounded_with_noise(asked, monkeypatch):
    monkeypatch.setenv("SSMGEN_ENGINE_NOISE", "12" if asked == "variable" else "0")
    noise.rounds.cache_clear()
    states = []
    for seed in (1, 2, 1):
        monkeypatch.setattr(noise.torch, "randint", lambda *_, seed=seed, **__: torch.tensor([seed]))
        state = randn(SLOTS, H, P, N, seed=3).half()
        step(state, cache(), tokens(1, 3), [0] * 3, [True] * 3, enable_stochastic_rounding=asked == "flag")
        states.append(state)
    noise.rounds.cache_clear()
    assert torch.equal(states[0], states[2]) and not torch.equal(states[0], states[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_cache": None}, "x_cache is None; expected a tensor"),
        ({"B_cache": torch.zeros(SLOTS, G, N)}, r"expected \[slots, H, L, P\] and \[slots, G, L, N\]"),
        ({"dt_cache": torch.zeros(SLOTS, H, LENGTH).half()}, "old_dt is float16; expected float32"),
        ({"write_pos": torch.zeros(3)}, "prev_num_accepted_tokens is float32; expected int32"),
        ({"write_pos": torch.zeros(2, dtype=I32)}, r"prev_num_accepted_tokens is \[2\]; expected \[batch\] = \[3\]"),
    ],
)
def test_says_what_is_wrong(change, words):
    state = randn(SLOTS, H, P, N)
    before = state.clone()
    with pytest.raises(ArgumentError, match=words):
        step(state, **{"kept": cache(), "token": tokens(1, 3), "at": [0] * 3, "flush": [True] * 3} | change_of(change))
    assert torch.equal(state, before)


def change_of(change: dict[str, Any]) -> dict[str, Any]:
    """The cache with these tensors, or these arguments."""
    kept = cache()
    ours = {n: v for n, v in change.items() if n in kept}
    return {"kept": kept | ours} | {n: v for n, v in change.items() if n not in kept}
