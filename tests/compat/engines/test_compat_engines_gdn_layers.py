"""SGLang's decode steps of gated delta rule layers, from one projection to the next, in float64."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_calls import HK, HV, K, V, delta_token, near, no_call_goes_to_the_engine, pages, sglang_functions  # noqa: F401
from torch import Tensor
from torch.nn.functional import silu
from torch_conv import BF16, F32, randn

from ssmgen.compat.shared import kda_layers

WIDTH, SLOTS, HIDDEN = 4, 6, 12
QKV = 2 * HK * K + HV * V
IN_QKVZ, IN_BA = randn(HIDDEN, QKV + HV * V, seed=1) / 3, randn(HIDDEN, 2 * HV, seed=2)
WEIGHT, OUT = randn(QKV, WIDTH, seed=3) / 2, randn(HV * V, HIDDEN, seed=4) / 3
A_LOG, DT_BIAS, NORM = randn(HV, seed=5) / 4, randn(HV, seed=6), randn(V, seed=7)
CONTEXT = "sglang.srt.model_executor.forward_context"
MODELS = {"sglang.srt.models.qwen3_5": "Qwen3_5GatedDeltaNet", "sglang.srt.models.qwen3_next": "Qwen3GatedDeltaNet"}
both = pytest.mark.parametrize("model", MODELS)


class TritonGDNKernel:
    """Named like SGLang's, by which the method knows the backend."""


class FlashInferGDNKernel:
    pass


def by_key_heads(qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor]:
    """The projections in Qwen3-Next's order: q, k, v and z of a key head, then the next one; b and a likewise."""
    of = HV // HK
    q, k, v, z = qkvz.split((HK * K, HK * K, HV * V, HV * V), 1)
    heads = [q.unflatten(1, (HK, K)), k.unflatten(1, (HK, K)), v.unflatten(1, (HK, of * V)), z.unflatten(1, (HK, of * V))]
    return torch.cat(heads, 2).flatten(1), torch.cat([t.unflatten(1, (HK, of)) for t in ba.split(HV, 1)], 2).flatten(1)


def split(qkvz: Tensor, ba: Tensor, key_heads: int, heads: int, keys: int, values: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """SGLang's fused_qkvzba_split_reshape_cat, which undoes that order."""
    assert (key_heads, heads, keys, values) == (HK, HV, K, V)
    q, k, v, z = qkvz.unflatten(1, (HK, -1)).split((K, K, HV // HK * V, HV // HK * V), 2)
    b, a = ba.unflatten(1, (HK, -1)).chunk(2, 2)
    return torch.cat([t.flatten(1) for t in (q, k, v)], 1), z.reshape(-1, HV, V), b.flatten(1), a.flatten(1)


class Step:
    """A decode step of one layer: its batch, its backend and its pools."""

    def __init__(self, model: str, monkeypatch, slots: Tensor, dtype: torch.dtype = F32, longer: int = 0):
        self.module = import_module(model)
        self.layer_class = getattr(self.module, MODELS[model])
        self.window, self.state = pages(SLOTS, QKV, WIDTH - 1 + longer, dtype=dtype), pages(SLOTS, HV, V, K)
        self.tracked: list[Any] = []
        self.backend = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(mamba2_layer_cache=lambda at: SimpleNamespace(conv=[self.window], temporal=self.state)),
            forward_metadata=SimpleNamespace(mamba_cache_indices=slots, replayssm_write_pos=None),
            kernel_dispatcher=SimpleNamespace(decode_kernel=TritonGDNKernel()),
            _track_mamba_state_decode=lambda *given: self.tracked.append(given),
        )  # fmt: skip
        hybrid = SimpleNamespace(linear_attn_backend=self.backend)
        monkeypatch.setattr(import_module(CONTEXT), "get_attn_backend", lambda: hybrid)
        monkeypatch.setattr(import_module("sglang.srt.models.qwen3_next"), "fused_qkvzba_split_reshape_cat", split)
        self.batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: True))
        attn = SimpleNamespace(
            layer_id=3, activation="silu", num_k_heads=HK, num_v_heads=HV, head_k_dim=K, head_v_dim=V, v_dim=HV * V, conv_weights=WEIGHT,
            bias=None, A_log=A_LOG, dt_bias=DT_BIAS,
        )  # fmt: skip
        norm = SimpleNamespace(weight=NORM, eps=1e-6, activation="swish", bias=None)
        if model.endswith("5"):
            norm.group_size, norm.norm_before_gate = None, True
        order = (lambda *t: t) if model.endswith("5") else by_key_heads
        self.projected = 0

        def projections(hidden: Tensor) -> tuple[Tensor, Tensor]:
            self.projected += 1
            return order(hidden.float() @ IN_QKVZ, hidden.float() @ IN_BA)

        self.layer = SimpleNamespace(attn=attn, norm=norm, _forward_input_proj=projections, out_proj=lambda t: (t @ OUT, None))

    def run(self, hidden: Tensor) -> Any:
        return self.layer_class.forward(self.layer, hidden, self.batch)


def wanted(hidden: Tensor, window: Tensor, state: Tensor, norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(input of the second projection [HV, V], window, state) of one row, in float64."""
    qkvz, ba = (hidden @ IN_QKVZ).double(), (hidden @ IN_BA).double()
    qkv, z = qkvz.split((QKV, HV * V))
    inputs = torch.cat([window.double(), qkv[:, None]], 1)
    q, k, v = silu((inputs * WEIGHT.double()).sum(1)).split((HK * K, HK * K, HV * V))
    x = {"q": q.view(HK, K), "k": k.view(HK, K), "v": v.view(HV, V), "b": ba[:HV], "a": ba[HV:], "A_log": A_LOG, "dt_bias": DT_BIAS}
    S, y = delta_token(state.double(), x)
    normed = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * NORM.double()
    gate = z.view(HV, V)
    return normed * (gate.sigmoid() if norm.activation == "sigmoid" else silu(gate)), inputs[:, 1:], S


@both
@pytest.mark.parametrize(("activation", "longer"), [("swish", 0), ("silu", 2), ("sigmoid", 0)])
def test_a_decode_step(sglang, monkeypatch, model, activation, longer):
    """Two steps. Slot -1 is padding, no other slot is written, and the counts are zeros again. Longer windows begin with the history."""
    slots = torch.tensor([4, -1, 0, 2], dtype=torch.int32)  # one more than rows
    step = Step(model, monkeypatch, slots, longer=longer)
    step.layer.norm.activation = activation
    for seed in (10, 11):
        hidden, window, state = randn(3, HIDDEN, seed=seed), step.window.clone(), step.state.clone()
        got = step.run(hidden)
        assert not got[1].any()
        for n, slot in ((0, 4), (2, 0)):
            want, after, S = wanted(hidden[n], window[slot, :, : WIDTH - 1], state[slot], step.layer.norm)
            assert near(got[n], want.flatten() @ OUT.double()) and near(step.state[slot], S)
            assert near(step.window[slot, :, : WIDTH - 1], after)
            assert torch.equal(step.window[slot, :, WIDTH - 1 :], window[slot, :, WIDTH - 1 :])
        others = [1, 2, 3, 5]
        assert torch.equal(step.window[others], window[others]) and torch.equal(step.state[others], state[others])
    assert not kda_layers.arrivals(step.state, HK).any()
    assert step.tracked == [(step.batch, step.window, step.state, slots, 3)] * 2


@both
def test_the_bits_are_those_of_the_three_functions(sglang, monkeypatch, model):
    slots = torch.tensor([4, 0], dtype=torch.int32)
    step = Step(model, monkeypatch, slots)
    hidden, window, state = randn(2, HIDDEN, seed=10), step.window.clone(), step.state.clone()
    got = step.run(hidden)
    plugin = import_module("ssmgen.compat.sglang")
    qkv, z = (hidden @ IN_QKVZ).split((QKV, HV * V), 1)
    b, a = (hidden @ IN_BA).split(HV, 1)
    mixed = plugin.causal_conv1d_update_triton(qkv, window, WEIGHT, None, "silu", conv_state_indices=slots)
    out = torch.empty(2, 1, HV, V)
    plugin.fused_recurrent_gated_delta_rule_packed_decode(mixed, a, b, A_LOG, DT_BIAS, K**-0.5, state, out, slots, True)
    normed = plugin.mixer2_rms_norm_gated(x=out.view(-1, V), weight=NORM, bias=None, z=z.reshape(-1, V), is_rms_norm=True)
    assert torch.equal(got, normed.view(2, -1) @ OUT)
    assert torch.equal(step.window[slots.long()], window[slots.long()]) and torch.equal(step.state[slots.long()], state[slots.long()])


def prompts(step: Step) -> None:
    step.batch.forward_mode = SimpleNamespace(is_decode=lambda: False)


def ring(step: Step) -> None:
    step.backend.forward_metadata.replayssm_write_pos = torch.zeros(2)


def flashinfer(step: Step) -> None:
    step.backend.kernel_dispatcher.decode_kernel = FlashInferGDNKernel()


def no_backend(step: Step) -> None:
    del step.backend.kernel_dispatcher


def relu(step: Step) -> None:
    step.layer.attn.activation = "relu"


def groups(step: Step) -> None:
    step.layer.norm.group_size = V // 2


def bf16_window(step: Step) -> None:
    step.window = step.window.to(BF16)


def few_slots(step: Step) -> None:
    step.backend.forward_metadata.mamba_cache_indices = torch.tensor([4], dtype=torch.int32)


@both
@pytest.mark.parametrize("why", [prompts, ring, flashinfer, no_backend, relu, groups, bf16_window, few_slots], ids=lambda f: f.__name__)
def test_steps_that_are_sglang_s_own(sglang, monkeypatch, model, why):
    """Without a warning, and before the projections are computed."""
    step = Step(model, monkeypatch, torch.tensor([4, 0], dtype=torch.int32))
    why(step)
    window, state = step.window.clone(), step.state.clone()
    assert step.run(randn(2, HIDDEN)).startswith("the engine's")
    assert not step.projected and not step.tracked and torch.equal(step.window, window) and torch.equal(step.state, state)


def test_a_ratio_of_heads_that_sglang_s_split_lacks(sglang, monkeypatch):
    step = Step("sglang.srt.models.qwen3_next", monkeypatch, torch.tensor([4, 0], dtype=torch.int32))
    step.layer.attn.num_k_heads = 1
    step.layer.attn.num_v_heads = 3
    assert step.run(randn(2, HIDDEN)).startswith("the engine's") and not step.projected


@both
@pytest.mark.refused
def test_a_refused_step(sglang, monkeypatch, caplog, model):
    """Windows of a wrong length: SGLang's own method does the step, and nothing was written."""
    step = Step(model, monkeypatch, torch.tensor([4, 0], dtype=torch.int32))
    step.layer.attn.conv_weights = randn(QKV, 9)
    state = step.state.clone()
    assert step.run(randn(2, HIDDEN)).startswith("the engine's") and torch.equal(step.state, state)
    assert "width" in caplog.text


def test_a_prompt_s_q_k_and_v_are_views(sglang):
    """In the name that SGLang's backend holds."""
    split = import_module("sglang.srt.layers.attention.linear.gdn_backend").fused_qkv_split_gdn_prefill
    mixed = randn(5, QKV + 3)[:, :QKV]
    q, k, v = split(mixed, HK, HK, HV, K, K, V)
    assert [t.shape for t in (q, k, v)] == [(1, 5, HK, K), (1, 5, HK, K), (1, 5, HV, V)]
    assert torch.equal(torch.cat([t[0].flatten(1) for t in (q, k, v)], 1), mixed)
    assert {t.untyped_storage().data_ptr() for t in (q, k, v)} == {mixed.untyped_storage().data_ptr()}


@pytest.mark.refused
@pytest.mark.parametrize("mixed", [randn(5, QKV - 1), randn(QKV, 5).t()], ids=["channels", "strides"])
def test_channels_that_do_not_fit_the_heads(sglang, mixed):
    split = import_module("sglang.srt.layers.attention.linear.gdn_backend").fused_qkv_split_gdn_prefill
    assert split(mixed, HK, HK, HV, K, K, V).startswith("the engine's")
