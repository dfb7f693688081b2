"""The engines' short convolution of Qwen4-Exp's n-gram layers, against torch's convolution in float64."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, pages, sglang_functions, vllm_functions  # noqa: F401
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


def summed(want: Tensor, *residuals: Tensor) -> Tensor:
    """Sums in float64, each rounded to the residual's dtype, after the convolution, which is rounded first."""
    for residual in residuals:
        want = (want.to(residual.dtype).double() + residual.double()).to(residual.dtype).double()
    return want


def sums_near(got: Tensor, conv: Tensor, *residuals: Tensor) -> bool:
    """Each rounding moves a sum by half a unit of the largest term."""
    size = conv.abs() + sum(r.double().abs() for r in residuals)
    bound = (1 + len(residuals)) * torch.finfo(got.dtype).eps * size + 2e-5
    return bool(((got.double() - summed(conv, *residuals)).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("pool_dtype", [F32, BF16])
@pytest.mark.parametrize("kept", [True, False])
def test_verified_drafts(sglang, dtype, pool_dtype, kept):
    """The pool is only read; tokens that are not valid get 0, and each token's window goes to its row."""
    count, width = 3, 4
    pool, x = pages(8, CHANNELS, STATE, dtype=pool_dtype), randn(count * width, CHANNELS, seed=2, dtype=dtype)
    residual, slots = randn(count * width, CHANNELS, seed=3, dtype=dtype), torch.tensor([4, 0, 2])
    valid = torch.tensor([True] * 4 + [False] * 4 + [True, True, False, False])
    windows = torch.full((5, 6, CHANNELS, STATE), 7.0, dtype=dtype) if kept else None
    before = pool.clone()
    got = sglang.fused_qwen4_verify_conv(x, residual, WEIGHT.to(dtype), pool, slots, valid, width, DILATION, windows)
    assert got.shape == x.shape and got.dtype == dtype and torch.equal(pool, before) and not got[~valid].any()
    for row, slot in ((0, 4), (2, 2)):
        at = slice(row * width, (row + 1) * width)
        want, inputs = wanted(x[at], before[slot].to(dtype))
        live = valid[at]
        assert sums_near(got[at][live], want[live], residual[at][live])
        for t in range(width):
            assert windows is None or torch.equal(windows[row, t].double(), inputs[:, t + 1 : t + 1 + STATE])
    assert windows is None or ((windows[3:] == 7).all() and (windows[:, 4:] == 7).all())


def test_verified_drafts_have_the_bits_of_decode_steps(sglang, monkeypatch):
    pool, x = pages(8, CHANNELS, STATE, dtype=BF16), randn(4, CHANNELS, seed=2, dtype=BF16)
    residual, slots = randn(4, CHANNELS, seed=3, dtype=BF16), torch.tensor([5])
    got = sglang.fused_qwen4_verify_conv(x, residual, WEIGHT.to(BF16), pool, slots, torch.ones(4, dtype=torch.bool), 4, DILATION, None)
    steps = [run(monkeypatch, x[t : t + 1], pool, "decode", [5], [1]) for t in range(4)]
    assert torch.equal(got, residual + torch.cat(steps))


@pytest.mark.refused
@pytest.mark.parametrize("why", ["tokens", "windows"])
def test_verified_drafts_that_do_not_fit(sglang, caplog, why):
    pool, x = pages(8, CHANNELS, STATE), randn(7 if why == "tokens" else 8, CHANNELS, seed=2)
    windows = torch.full((2, 4, CHANNELS, STATE), 7.0, dtype=BF16)
    valid = torch.ones(x.shape[0], dtype=torch.bool)
    call = (x, x.clone(), WEIGHT, pool, torch.tensor([4, 2]), valid, 4, DILATION, windows)
    assert sglang.fused_qwen4_verify_conv(*call).startswith("the engine's") and (windows == 7).all()
    assert ("x has 7 tokens; expected 2 width = 8" if why == "tokens" else "intermediate_conv_window is bfloat16") in caplog.text


class Ple:
    """A call of vLLM's ple_conv: a pool of windows in either layout, inputs, and the residuals."""

    def __init__(self, tokens: int, dtype: torch.dtype, outer: bool, first: bool, drafts: int = 0):
        entries = STATE + drafts
        self.pool = pages(9, CHANNELS, entries, dtype=dtype) if first else pages(9, entries, CHANNELS, dtype=dtype).transpose(1, 2)
        self.inputs, self.residual = randn(tokens, CHANNELS, seed=2, dtype=dtype), randn(tokens, CHANNELS, seed=3, dtype=dtype)
        self.outer = randn(tokens, CHANNELS, seed=4, dtype=dtype) if outer else None
        self.before, self.out = self.pool.clone(), self.residual.clone()

    def run(self, slots: list[int], mode: str, rows: Tensor | None = None, **more: Any) -> Any:
        weight = WEIGHT.squeeze(1).to(self.inputs.dtype)
        table = torch.tensor([[slot, 0] for slot in slots], dtype=torch.int32)[:, 0]  # a column, as vLLM has it
        return import_module("vllm.models.qwen4_exp.nvidia.ple_layer").ple_conv(
            inputs=self.inputs, residual=self.out, conv_state=self.pool, conv_weights=weight, state_indices=table,
            outer_residual=self.outer, mode=mode, dilation=DILATION, token_indices=rows, **more,
        )  # fmt: skip

    def follows(self, rows: Any, window: Tensor) -> bool:
        """Whether these rows are the outputs of a sequence with this window."""
        want, _ = wanted(self.inputs[rows], window)
        if self.outer is None:
            return near(self.out[rows], want)
        return sums_near(self.out[rows], want, self.residual[rows], self.outer[rows])

    def window(self, rows: Any, before: Tensor) -> Tensor:
        return torch.cat([before, self.inputs[rows].t()], 1)[:, -STATE:]


layouts = pytest.mark.parametrize("first", [True, False], ids=["windows first", "channels first"])
forms = pytest.mark.parametrize(("dtype", "outer"), [(F32, True), (BF16, True), (BF16, False)])
ROWS = torch.tensor([6, 1, 4, 2])


@layouts
@forms
@pytest.mark.parametrize("listed", [False, True])
def test_vllm_s_decode_steps(vllm, dtype, outer, first, listed):
    """The second row is padding, and the third begins without a window."""
    step = Ple(7 if listed else 4, dtype, outer, first, drafts=2)
    rows = ROWS if listed else torch.arange(4)
    step.pool[8], step.before[8] = torch.nan, torch.nan
    started = torch.tensor([True, False, False, True])
    assert step.run([4, 0, 8, 2], "decode", ROWS if listed else None, has_initial_states=started) is None
    zeros = torch.zeros(CHANNELS, STATE, dtype=dtype)
    for row, slot, window in ((0, 4, step.before[4, :, :STATE]), (2, 8, zeros), (3, 2, step.before[2, :, :STATE])):
        at = rows[row : row + 1]
        assert step.follows(at, window) and torch.equal(step.pool[slot, :, :STATE], step.window(at, window))
    assert not step.out[rows[1]].any()
    others = [i for i in range(len(step.out)) if i not in rows]
    assert torch.equal(step.out[others], step.residual[others])
    assert torch.equal(step.pool[[0, 1, 3, 5, 6, 7]], step.before[[0, 1, 3, 5, 6, 7]])
    assert torch.equal(step.pool[[4, 2], :, STATE:], step.before[[4, 2], :, STATE:]), "entries for drafts are left alone"


@layouts
@forms
@pytest.mark.parametrize("listed", [False, True])
def test_vllm_s_prompts(vllm, dtype, outer, first, listed):
    """Longer and shorter than a window, without a window, and padding."""
    lengths, slots, started = [14, 3, 20, 2], [4, 2, 5, 0], [True, True, False, True]
    total = sum(lengths)
    step = Ple(total + 3, dtype, outer, first, drafts=2)
    rows = torch.arange(total + 3).flip(0)[:total] if listed else torch.arange(total)
    starts = torch.tensor([0, 14, 17, 37, 39], dtype=torch.int32)
    more = {"query_start_loc": starts, "has_initial_states": torch.tensor(started)}
    step.pool[5], step.before[5] = torch.nan, torch.nan
    assert step.run(slots, "prefill", rows if listed else None, **more) is None
    for i, slot in enumerate(slots[:3]):
        at = rows[int(starts[i]) : int(starts[i + 1])]
        window = step.before[slot, :, :STATE] if started[i] else torch.zeros(CHANNELS, STATE, dtype=dtype)
        assert step.follows(at, window) and torch.equal(step.pool[slot, :, :STATE], step.window(at, window))
    assert not step.out[rows[37:]].any()
    others = [i for i in range(total + 3) if i not in rows]
    assert torch.equal(step.out[others], step.residual[others])
    assert torch.equal(step.pool[[0, 1, 3, 6, 7, 8]], step.before[[0, 1, 3, 6, 7, 8]])


@layouts
@forms
@pytest.mark.parametrize("listed", [False, True])
def test_vllm_s_drafts(vllm, dtype, outer, first, listed):
    """The history begins after the accepted tokens; the last row of starts is padding of a graph."""
    slots, accepted = [4, 0, 2], [3, 1, 1]
    step = Ple(9 if listed else 6, dtype, outer, first, drafts=2)
    rows = torch.tensor([8, 0, 5, 3, 7, 1]) if listed else torch.arange(6)
    starts = torch.tensor([0, 3, 4, 6, 6], dtype=torch.int32)
    more = {"query_start_loc": starts, "num_accepted_tokens": torch.tensor([*accepted, 1], dtype=torch.int32), "spec_query_len": 3}
    assert step.run(slots, "spec", rows if listed else None, **more) is None
    for i in (0, 2):
        at, slot = rows[int(starts[i]) : int(starts[i + 1])], slots[i]
        window = step.before[slot, :, accepted[i] - 1 :][:, :STATE]
        assert step.follows(at, window)
        entries = torch.cat([window[:, 1:], step.inputs[at].t()], 1)
        assert torch.equal(step.pool[slot, :, : entries.shape[1]], entries)
    assert not step.out[rows[3]].any()
    assert torch.equal(step.pool[[0, 1, 3, 5, 6, 7, 8]], step.before[[0, 1, 3, 5, 6, 7, 8]])


@pytest.mark.refused
@pytest.mark.parametrize(
    ("mode", "more", "words"),
    [
        ("prompt", {}, "mode is 'prompt'; expected one of decode, spec, prefill"),
        ("spec", {"query_start_loc": torch.tensor([0, 1])}, "num_accepted_tokens is None with mode='spec'"),
        ("decode", {"has_initial_states": torch.ones(1, dtype=torch.bool)}, "has_initial_state is [1]"),
    ],
)  # fmt: skip
def test_vllm_s_calls_that_do_not_fit(vllm, caplog, mode, more, words):
    step = Ple(2, F32, True, True)
    assert step.run([4, 2], mode, **more).startswith("the engine's") and words in caplog.text
    assert torch.equal(step.pool, step.before) and torch.equal(step.out, step.residual)
