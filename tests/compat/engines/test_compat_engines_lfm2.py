"""The engines' short convolution of LFM2 with its two gates, in float64."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, pages, sglang_functions, vllm_functions  # noqa: F401
from torch import Tensor
from torch_conv import BF16, F32, close, conv, randn

VLLM = "vllm.model_executor.layers.mamba.short_conv"
LAYERS = {"sglang.srt.models.lfm2": "Lfm2ShortConv", "sglang.srt.models.lfm2_moe": "Lfm2MoeShortConv"}
HIDDEN, WIDTH = 12, 3
WEIGHT, BIAS = randn(HIDDEN, 1, WIDTH, seed=1), randn(HIDDEN, seed=2)
IN, OUT = randn(HIDDEN, 3 * HIDDEN, seed=3) / 3, randn(HIDDEN, HIDDEN, seed=4) / 3


def gates_of(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """b, c and x of LFM2's projection."""
    b, c, x = (hidden @ IN).chunk(3, 1)
    return b, c, x


def wanted(hidden: Tensor, window: Tensor, slots: list[int], pad: int) -> tuple[Tensor, Tensor]:
    """(outputs after the second projection, windows) of one token per sequence."""
    b, c, x = gates_of(hidden)
    after, outputs = window.clone(), torch.zeros(len(slots), HIDDEN, dtype=torch.float64)
    for n, slot in enumerate(slots):
        if slot <= pad:
            continue
        y, _ = conv(window[slot], (b * x)[n, :, None], WEIGHT[:, 0], BIAS)
        outputs[n] = c[n].double() * y[:, 0]
        after[slot] = torch.cat([window[slot, :, 1:], (b * x)[n, :, None]], 1)
    return outputs @ OUT.double(), after


def vllm_layer(module: Any, window: Tensor, step: Any, monkeypatch, by_windows: bool) -> Any:
    monkeypatch.setattr(module, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layers.0": step}))
    monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: not by_windows)
    return SimpleNamespace(
        prefix="layers.0", kv_cache=(window,), conv=SimpleNamespace(weight=WEIGHT, bias=BIAS), in_proj=lambda t: (t @ IN, None),
        out_proj=lambda t: (t @ OUT, None),
    )  # fmt: skip


def near(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_windows", [False, True])
@pytest.mark.parametrize("columns", [0, 2])
def test_vllm_decode_steps(vllm, monkeypatch, columns, by_windows):
    """Rows after the step's are padding of a graph, and stay unchanged. The first column of a table of slots is read."""
    module, slots = import_module(VLLM), torch.tensor([4, 0, 2], dtype=torch.int32)
    window = pages(6, WIDTH - 1, HIDDEN).transpose(1, 2) if by_windows else pages(6, HIDDEN, WIDTH - 1)
    table = torch.stack([slots] + [torch.full_like(slots, 5)] * (columns - 1), 1) if columns else slots
    step = SimpleNamespace(num_prefills=0, num_decode_tokens=3, state_indices_tensor_d=table, num_accepted_tokens=None)
    layer = vllm_layer(module, window.transpose(1, 2) if by_windows else window, step, monkeypatch, by_windows)
    hidden, output = randn(5, HIDDEN, seed=6), torch.full((5, HIDDEN), 7.0)
    want, after = wanted(hidden[:3], window.clone(), slots.tolist(), pad=0)
    assert module.ShortConv.forward_cuda(layer, hidden, output) is None
    assert near(output[:3], want) and (output[3:] == 7).all() and near(window, after.double())


def test_vllm_drafts(vllm, monkeypatch):
    """Packed, with counts of accepted tokens. The results equal the results of the functions that vLLM calls."""
    module, plain = import_module(VLLM), import_module("ssmgen.compat.vllm").causal_conv1d_update
    window = pages(6, HIDDEN, WIDTH + 1)
    table, accepted = torch.tensor([[4, 1, 1], [2, 3, 3]], dtype=torch.int32), torch.tensor([2, 1])
    starts, other = torch.tensor([0, 3, 5], dtype=torch.int32), window.clone()
    step = SimpleNamespace(num_prefills=0, num_decode_tokens=5, state_indices_tensor_d=table, num_accepted_tokens=accepted)
    step.query_start_loc_d = starts
    hidden, output = randn(5, HIDDEN, seed=6), torch.zeros(5, HIDDEN)
    module.ShortConv.forward_cuda(vllm_layer(module, window, step, monkeypatch, False), hidden, output)
    b, c, x = gates_of(hidden)
    y = plain(
        b * x, other, WEIGHT[:, 0], BIAS, conv_state_indices=table, num_accepted_tokens=accepted, query_start_loc=starts, max_query_len=3
    )
    assert torch.equal(output, (c * y) @ OUT) and torch.equal(window, other)


def vllm_prompts(slots: list[int], starts: list[int], started: list[bool] | None) -> dict[str, Any]:
    return {
        "num_prefills": len(slots), "num_prefill_tokens": starts[-1], "state_indices_tensor_p": torch.tensor(slots, dtype=torch.int32),
        "query_start_loc_p": torch.tensor(starts, dtype=torch.int32),
        "has_initial_states_p": None if started is None else torch.tensor(started),
    }  # fmt: skip


@pytest.mark.parametrize("by_windows", [False, True])
@pytest.mark.parametrize("decoded", ["nothing", "steps", "drafts"])
@pytest.mark.parametrize("started", [None, [True, False]])
def test_vllm_steps_with_prompts(vllm, monkeypatch, decoded, started, by_windows):
    """Decoded tokens come before prompts. The results equal the operations of vLLM's method; rows after the step's stay unchanged."""
    module, plugin = import_module(VLLM), import_module("ssmgen.compat.vllm")
    tokens = {"nothing": 0, "steps": 2, "drafts": 5}[decoded]
    window = pages(7, WIDTH + 1, HIDDEN).transpose(1, 2) if by_windows else pages(7, HIDDEN, WIDTH + 1)
    other, prompts = window.clone(), vllm_prompts([5, 6], [0, 4, 11], started)
    table = torch.tensor([[4, 1, 1], [2, 3, 3]], dtype=torch.int32)
    where: dict[str, Any] = {"conv_state_indices": table}
    step = SimpleNamespace(**prompts, num_decode_tokens=tokens, state_indices_tensor_d=table, num_accepted_tokens=None)
    if decoded == "drafts":
        step.num_accepted_tokens, step.query_start_loc_d = torch.tensor([2, 1]), torch.tensor([0, 3, 5], dtype=torch.int32)
        where |= {"num_accepted_tokens": step.num_accepted_tokens, "query_start_loc": step.query_start_loc_d, "max_query_len": 3}
    layer = vllm_layer(module, window.transpose(1, 2) if by_windows else window, step, monkeypatch, by_windows)
    hidden, output = randn(tokens + 13, HIDDEN, seed=6), torch.full((tokens + 13, HIDDEN), 7.0)
    assert module.ShortConv.forward_cuda(layer, hidden, output) is None
    b, c, x = (t[: tokens + 11] for t in gates_of(hidden))
    parts = [plugin.causal_conv1d_update((b * x)[:tokens], other, WEIGHT[:, 0], BIAS, **where)] if tokens else []
    y = plugin.causal_conv1d_fn(
        (b * x)[tokens:].t(), WEIGHT[:, 0], BIAS, other, prompts["query_start_loc_p"], prompts["state_indices_tensor_p"],
        prompts["has_initial_states_p"], activation=None,
    )  # fmt: skip
    assert torch.equal(output[: tokens + 11], (c * torch.cat([*parts, y.t()])) @ OUT) and torch.equal(window, other)
    assert (output[tokens + 11 :] == 7).all()


@pytest.mark.refused
def test_vllm_prompts_that_are_refused(vllm, monkeypatch, caplog):
    """The windows of decoded tokens stay as they were, too."""
    module, window = import_module(VLLM), pages(7, HIDDEN, WIDTH - 1)
    kept, prompts = window.clone(), vllm_prompts([5, 6], [0, 4, 11], [True, False, True])
    prompts["has_initial_states_p"] = torch.tensor([1.0, 0.0])
    slots = torch.tensor([4, 2], dtype=torch.int32)
    step = SimpleNamespace(**prompts, num_decode_tokens=2, state_indices_tensor_d=slots, num_accepted_tokens=None)
    layer, output = vllm_layer(module, window, step, monkeypatch, False), torch.zeros(13, HIDDEN)
    assert module.ShortConv.forward_cuda(layer, randn(13, HIDDEN), output).startswith("the engine's")
    assert "has_initial_state is" in caplog.text and torch.equal(window, kept) and not output.any()


@pytest.mark.parametrize("why", ["no step", "nothing"])
def test_vllm_steps_that_are_its_own(vllm, monkeypatch, why):
    """Without a warning."""
    module = import_module(VLLM)
    step = None if why == "no step" else SimpleNamespace(num_prefills=0, num_decode_tokens=0)
    layer = vllm_layer(module, pages(2, HIDDEN, WIDTH - 1), step, monkeypatch, False)
    assert module.ShortConv.forward_cuda(layer, randn(2, HIDDEN), randn(2, HIDDEN)).startswith("the engine's")


@pytest.mark.refused
def test_vllm_states_of_another_dtype(vllm, monkeypatch, caplog):
    module, window = import_module(VLLM), pages(6, HIDDEN, WIDTH - 1, dtype=BF16)
    kept, slots = window.clone(), torch.tensor([4, 2], dtype=torch.int32)
    step = SimpleNamespace(num_prefills=0, num_decode_tokens=2, state_indices_tensor_d=slots, num_accepted_tokens=None)
    layer, output = vllm_layer(module, window, step, monkeypatch, False), torch.zeros(2, HIDDEN)
    assert module.ShortConv.forward_cuda(layer, randn(2, HIDDEN), output).startswith("the engine's")
    assert "conv_state is bfloat16; expected float32, the dtype of x" in caplog.text and torch.equal(window, kept) and not output.any()


def sglang_mode(name: str) -> Any:
    return SimpleNamespace(forward_mode=SimpleNamespace(**{f"is_{n}": lambda n=n: n == name for n in ("decode", "idle", "target_verify")}))


def sglang_layer(monkeypatch, step: Any, batch: Any, bias: bool) -> Any:
    """A layer whose backend has this step of this batch."""
    backend = SimpleNamespace(conv_state_metadata=lambda layer, given: step if (layer, given) == (3, batch) else None)
    monkeypatch.setattr(import_module("sglang.srt.model_executor.forward_context"), "get_attn_backend", lambda: backend)
    return SimpleNamespace(
        layer_idx=3, conv_weight=WEIGHT[:, 0], conv_bias=BIAS if bias else torch.zeros(HIDDEN), in_proj=lambda t: (t @ IN, None),
        out_proj=lambda t: (t @ OUT, None),
    )  # fmt: skip


@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("bias", [True, False])
def test_sglang_decode_steps(sglang, monkeypatch, model, bias):
    slots, window = torch.tensor([4, -1, 0], dtype=torch.int32), pages(6, HIDDEN, WIDTH - 1)
    step, batch = SimpleNamespace(layer_cache=SimpleNamespace(conv=[window]), cache_indices=slots), sglang_mode("decode")
    layer, function = sglang_layer(monkeypatch, step, batch, bias), getattr(import_module(model), LAYERS[model]).forward
    hidden = randn(3, HIDDEN, seed=6)
    want, after = wanted(hidden, window.clone(), slots.tolist(), pad=-1)
    got = function(layer, hidden, batch)
    assert near(window, after.double())
    if bias:
        assert near(got, want)


@pytest.mark.parametrize("model", LAYERS)
def test_sglang_prompts(sglang, monkeypatch, model):
    """Three prompts, of which the first continues one and the second is padding. The results equal SGLang's three operations."""
    slots, window = torch.tensor([4, -1, 0], dtype=torch.int32), pages(6, HIDDEN, WIDTH - 1)
    starts, started, other = torch.tensor([0, 5, 6, 13], dtype=torch.int32), torch.tensor([True, True, False]), window.clone()
    step = SimpleNamespace(
        layer_cache=SimpleNamespace(conv=[window]), cache_indices=slots, query_start_loc=starts, has_initial_state=started
    )  # fmt: skip
    batch, hidden = sglang_mode("extend"), randn(13, HIDDEN, seed=6)
    layer, function = sglang_layer(monkeypatch, step, batch, True), getattr(import_module(model), LAYERS[model]).forward
    b, c, x = gates_of(hidden)
    y = import_module("ssmgen.compat.sglang").causal_conv1d_fn(
        (b * x).t(), WEIGHT[:, 0], BIAS, query_start_loc=starts, cache_indices=slots, has_initial_state=started, conv_states=other,
        activation=None,
    )  # fmt: skip
    got = function(layer, hidden, batch)
    assert torch.equal(got, (c * y.t()) @ OUT) and torch.equal(window, other) and not got[5].any()
    history = torch.cat([pages(6, HIDDEN, WIDTH - 1)[4], (b * x)[:5].t()], 1)
    exact, _ = conv(history[:, : WIDTH - 1], history[:, WIDTH - 1 :], WEIGHT[:, 0], BIAS)
    assert near(got[:5], (c[:5].double() * exact.t()) @ OUT.double()) and torch.equal(window[4], history[:, -(WIDTH - 1) :])


@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("mode", ["idle", "target_verify", "extend"])
def test_sglang_steps_that_are_its_own(sglang, monkeypatch, model, mode):
    """Without a warning: empty batches, verified drafts, and a prompt whose start is not known."""
    step = SimpleNamespace(layer_cache=None, cache_indices=None, query_start_loc=None, has_initial_state=None)
    batch = sglang_mode(mode)
    layer = sglang_layer(monkeypatch, step, batch, True)
    assert getattr(import_module(model), LAYERS[model]).forward(layer, randn(3, HIDDEN), batch).startswith("the engine's")


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sglang_prompts_of_lfm2_moe(sglang, dtype):
    """The fused function: b, c and x are slices of a row; both products are rounded."""
    module, plain = import_module("sglang.srt.models.lfm2_moe"), import_module("ssmgen.compat.sglang").causal_conv1d_fn
    b, c, x = randn(13, 3 * HIDDEN, seed=6, dtype=dtype).chunk(3, 1)
    weight, window = randn(HIDDEN, WIDTH, seed=7, dtype=dtype), pages(6, HIDDEN, WIDTH - 1, dtype=dtype)
    starts, slots, started = torch.tensor([0, 5, 5, 13], dtype=torch.int32), torch.tensor([4, 2, 0]), torch.tensor([True, True, False])
    other = window.clone()
    y = plain(
        (b * x).t(), weight, None, query_start_loc=starts, cache_indices=slots, has_initial_state=started, conv_states=other,
        activation=None,
    )  # fmt: skip
    got = module.fused_lfm_short_conv_prefill(b, c, x, weight, window, starts, slots, started, 8)
    assert got.dtype == dtype and got.is_contiguous() and torch.equal(got, c * y.t()) and torch.equal(window, other)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sglang_decode_steps_of_lfm2_moe(sglang, dtype):
    """b, c and x are slices of a row; both products are rounded, as the kernel there does."""
    function = import_module("sglang.srt.models.lfm2_moe").fused_lfm_short_conv_decode
    b, c, x = randn(3, 3 * HIDDEN, seed=6, dtype=dtype).chunk(3, 1)
    weight, window, slots = randn(HIDDEN, WIDTH, seed=7, dtype=dtype), pages(6, HIDDEN, WIDTH - 1, dtype=dtype), torch.tensor([4, -1, 0])
    before, got = window.clone(), None
    got = function(b, c, x, weight, window, slots)
    assert got.dtype == dtype and not got[1].any()
    for n, slot in ((0, 4), (2, 0)):
        product = (b * x)[n, :, None]
        y, bound = conv(before[slot], product, weight)
        size = c[n].double().abs()
        assert close(got[n, :, None], (c[n, :, None].double() * y, size[:, None] * (bound + torch.finfo(dtype).eps * y.abs())))
        assert torch.equal(window[slot], torch.cat([before[slot, :, 1:], product], 1))
        window[slot] = before[slot]
    assert torch.equal(window, before)
