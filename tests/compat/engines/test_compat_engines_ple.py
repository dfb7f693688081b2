"""SGLang's short convolution of Qwen4-Exp's n-gram layers, against torch's convolution in float64."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, pages, sglang_functions  # noqa: F401
from torch import Tensor
from torch.nn.functional import conv1d, silu
from torch_conv import BF16, F32, randn

MODULE = "sglang.srt.models.qwen4_exp"
CHANNELS, WIDTH, DILATION = 16, 4, 3
STATE = (WIDTH - 1) * DILATION
WEIGHT = randn(CHANNELS, 1, WIDTH, seed=1)


class Mode:
    def __init__(self, name: str):
        self.is_decode, self.is_target_verify = (lambda: name == "decode"), (lambda: name == "target_verify")


def run(monkeypatch, x: Tensor, pool: Tensor, mode: str, slots: list[int], lengths: list[int], track: Any = None) -> Any:
    """The method on a batch of these sequences."""
    module = import_module(MODULE)
    monkeypatch.setattr(module, "get_req_to_token_pool", lambda: SimpleNamespace(short_conv_layer_cache=lambda layer: {3: pool}[layer]))
    monkeypatch.setattr(module, "_ple_track_targets", lambda forward_batch, batch: track)
    layer = SimpleNamespace(layer_id=3, short_conv_dilation=DILATION, conv1d=SimpleNamespace(weight=WEIGHT.to(x.dtype)))
    batch = SimpleNamespace(mode=Mode(mode), state_indices=torch.tensor(slots), lengths=torch.tensor(lengths))
    return module.Qwen4ExpPLELayer._short_conv(layer, x, "forward_batch", batch)


def wanted(x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs [tokens, channels], all inputs [channels, window and tokens]) of one sequence, in float64."""
    inputs = torch.cat([window, x.t()], 1).double()
    return silu(conv1d(inputs, WEIGHT.to(x.dtype).double(), groups=CHANNELS, dilation=DILATION)).t(), inputs


def near(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.double(), want, rtol=torch.finfo(got.dtype).eps, atol=2e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("tracked", [False, True])
def test_decode_steps(sglang, monkeypatch, dtype, tracked):
    """Rows of slot 0 are padding: a zero output. Tracked windows are the new ones."""
    pool, x = pages(8, CHANNELS, STATE, dtype=dtype), randn(4, CHANNELS, seed=2, dtype=dtype)
    before, track = pool.clone(), (torch.tensor([6, 0, 0, 7]), torch.ones(4)) if tracked else None
    got = run(monkeypatch, x, pool, "decode", [4, 0, 0, 2], [1] * 4, track)
    assert got.dtype == dtype and not got[1:3].any()
    for row, slot, copy in ((0, 4, 6), (3, 2, 7)):
        want, inputs = wanted(x[row : row + 1], before[slot])
        assert near(got[row], want[0]) and torch.equal(pool[slot].double(), inputs[:, 1:])
        assert torch.equal(pool[copy], pool[slot] if tracked else before[copy])
    assert torch.equal(pool[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("tracked", [False, True])
def test_prompts(sglang, monkeypatch, dtype, tracked):
    """Sequences that are longer and shorter than a window, one without tokens, and tokens after the last sequence."""
    lengths, slots, counts = [14, 0, 3, 20], [4, 0, 2, 5], [9, 0, 1, 16]
    pool, x = pages(10, CHANNELS, STATE, dtype=dtype), randn(sum(lengths) + 2, CHANNELS, seed=2, dtype=dtype)
    before, track = pool.clone(), (torch.tensor([6, 0, 7, 8]), torch.tensor(counts)) if tracked else None
    got, start = run(monkeypatch, x, pool, "extend", slots, lengths, track), 0
    assert got.shape == x.shape and got.dtype == dtype
    for length, slot, count, copy in zip(lengths, slots, counts, (6, 0, 7, 8), strict=True):
        if length:
            want, inputs = wanted(x[start : start + length], before[slot])
            assert near(got[start : start + length], want) and torch.equal(pool[slot].double(), inputs[:, length:])
            kept = inputs[:, count : count + STATE] if tracked else before[copy].double()
            assert torch.equal(pool[copy].double(), kept)
        start += length
    assert torch.equal(pool[[0, 1, 3, 9]], before[[0, 1, 3, 9]])


@pytest.mark.parametrize(("mode", "tokens"), [("target_verify", 4), ("extend", 0)])
def test_calls_that_are_sglang_s_own(sglang, monkeypatch, mode, tokens):
    """Without a warning."""
    pool = pages(8, CHANNELS, STATE)
    assert run(monkeypatch, randn(tokens, CHANNELS), pool, mode, [4], [tokens]).startswith("the engine's")


@pytest.mark.refused
def test_windows_of_another_dtype(sglang, monkeypatch, caplog):
    pool = pages(8, CHANNELS, STATE, dtype=BF16)
    before = pool.clone()
    track = (torch.tensor([6]), torch.tensor([1]))
    assert run(monkeypatch, randn(1, CHANNELS), pool, "decode", [4], [1], track).startswith("the engine's")
    assert "conv_state is bfloat16; expected float32, the dtype of x" in caplog.text and torch.equal(pool, before)
