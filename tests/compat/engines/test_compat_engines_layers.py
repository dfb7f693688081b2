"""The engines' decode layers that are one kernel there, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, pages, poisoned, sglang_functions, vllm_functions  # noqa: F401
from torch import Tensor
from torch.nn.functional import silu
from torch_conv import F32, randn

from ssmgen.compat.shared import kda_layers

H, D, WIDTH, SLOTS = 2, 16, 4, 6
SIZE = H * D  # channels of q, of k and of v


def operands(batch: int) -> dict[str, Tensor]:
    """The operands of both engines in one form: slices of a projection's output, weights of q, k and v by width."""
    wide = randn(batch, 3 * SIZE + 5, seed=1)
    return {
        "x": wide[:, : 3 * SIZE], "taps": randn(3, WIDTH, SIZE, seed=2) / 2, "bias": randn(3 * SIZE, seed=3),
        "a": randn(batch, H, D, seed=4), "b": randn(batch, H, seed=5), "A_log": randn(H, seed=6) / 4, "dt_bias": randn(SIZE, seed=7),
        "gate": randn(batch, H, D, seed=8), "weight": randn(D, seed=10),
    }  # fmt: skip


def layer(x: dict[str, Tensor], n: int, window: Tensor, S: Tensor, bound: float | None, norm: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(output [H, D], window [channels, width - 1], state [H, V, K]) of one row, in float64."""
    of = {name: t.double() for name, t in x.items()}
    inputs = torch.cat([window.double(), of["x"][n][:, None]], 1)
    taps = of["taps"].transpose(1, 2).reshape(3 * SIZE, WIDTH)
    q, k, v = silu((inputs * taps).sum(1) + of["bias"]).view(3, H, D)
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    raw, A = of["a"][n] + of["dt_bias"].view(H, D), of["A_log"].exp()[:, None]
    decay = -A * raw.exp().log1p() if bound is None else bound * (A * raw).sigmoid()
    S = S.double() * decay.exp()[:, None]
    S = S + (of["b"][n].sigmoid()[:, None] * (v - (S * k[:, None]).sum(-1)))[..., None] * k[:, None]
    y = D**-0.5 * (S * q[:, None]).sum(-1)
    if norm:
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * of["weight"] * of["gate"][n].sigmoid()
    return y, inputs[:, 1:], S


def call(engine: Any, x: dict[str, Tensor], window: Tensor, state: Tensor, slots: Tensor, bound: float | None, norm: bool) -> Tensor:
    """The engine's function -> [batch, H, D]. window: [slots, channels, width - 1]."""
    if hasattr(engine, "fused_kda_decode"):
        out = poisoned(1, x["x"].shape[0], H, D)
        more = {"output_gate": x["gate"], "norm_weight": x["weight"]} if norm else {}
        got = engine.fused_kda_decode(
            x["x"], x["taps"], x["bias"], window, x["a"][None], x["b"][None], x["A_log"].view(1, 1, H, 1), x["dt_bias"], slots, state,
            out=out, lower_bound=bound, **more,
        )  # fmt: skip
        assert got is out
        return got[0]
    got = engine.kda_fused_decode(
        x["x"], x["a"].flatten(1), x["b"], window.transpose(1, 2), *x["taps"], x["bias"], x["A_log"], x["dt_bias"], x["gate"].flatten(1),
        x["weight"], state, slots, scale=D**-0.5, onorm_eps=1e-5, lower_bound=bound,
    )  # fmt: skip
    assert got.shape == (1, x["x"].shape[0], H, D)
    return got[0]


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize(("engine", "norm"), [("vllm", True), ("vllm", False), ("sglang", True)])
@pytest.mark.parametrize("by", ["channels", "windows"])
def test_decode_layers_of_kimi_k3(request, engine, norm, bound, by):
    """Two steps. Slot -1 is padding, for vLLM also slot 0; no other slot is written, and the counts are zeros again."""
    held, slots = request.getfixturevalue(engine), torch.tensor([4, 0, -1, 2], dtype=torch.int32)
    x, state = operands(4), pages(SLOTS, H, D, D)
    window = pages(SLOTS, 3 * SIZE, WIDTH - 1) if by == "channels" else pages(SLOTS, WIDTH - 1, 3 * SIZE).transpose(1, 2)
    first = 1 if engine == "vllm" else 0
    for _ in range(2):
        windows, states = window.clone(), state.clone()
        got = call(held, x, window, state, slots, bound, norm)
        want_window, want_state = windows.double(), states.double()
        for n, slot in enumerate(slots.tolist()):
            if slot < first:
                assert not got[n].any()
                continue
            y, want_window[slot], want_state[slot] = layer(x, n, windows[slot], states[slot], bound, norm)
            assert torch.allclose(got[n].double(), y, rtol=2e-5, atol=2e-5)
        assert torch.equal(window.double(), want_window) and torch.allclose(state.double(), want_state, rtol=1e-5, atol=1e-5)
    assert not kda_layers.arrivals(state, H).any() and kda_layers.arrivals(state, H) is kda_layers.arrivals(state[:], H)


@pytest.mark.refused
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_layers_that_are_refused(request, engine, caplog):
    """Before anything is written: taps of another form, and a window of another dtype than the input."""
    held, x, slots = request.getfixturevalue(engine), operands(2), torch.tensor([1, 2], dtype=torch.int32)
    state, window = pages(SLOTS, H, D, D), pages(SLOTS, 3 * SIZE, WIDTH - 1)
    kept = state.clone(), window.clone()
    own = held.fused_kda_decode if engine == "vllm" else held.kda_fused_decode
    shared = {"A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    if engine == "vllm":
        given = shared | {"x": x["x"], "bias": None, "conv_state": window, "raw_g": x["a"][None], "raw_beta": x["b"][None]}
        given |= {"state_indices": slots, "state": state}
        calls = [given | {"weight": x["taps"][:2]}, given | {"weight": x["taps"], "x": x["x"].half()}]
    else:
        given = shared | {"mixed_qkv": x["x"], "a": x["a"].flatten(1), "b": x["b"], "conv_states": window.transpose(1, 2)}
        given |= {"w_q_t": x["taps"][0], "w_k_t": x["taps"][1], "conv_bias": x["bias"], "onorm_g": x["gate"].flatten(1)}
        given |= {"onorm_weight": x["weight"], "ssm_states": state, "cache_indices": slots, "scale": 1.0, "onorm_eps": 1e-5}
        calls = [given | {"w_v_t": x["taps"][2, :3]}, given | {"w_v_t": x["taps"][2], "mixed_qkv": x["x"].half()}]
    for c in calls:
        assert own(**c) == own.__wrapped__(**c)
    assert "; expected [3, width, H V] and [B, 3 H V]" in caplog.text or "taps of q, k and v" in caplog.text
    assert torch.equal(state, kept[0]) and torch.equal(window, kept[1]) and state.dtype == F32
