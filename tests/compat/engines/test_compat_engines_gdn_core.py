"""vLLM's method for a step with prompts of gated delta rules: states in their pool, against tokens one by one in float64."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delta_oracles import BF16, CHUNK, F32, HK, HV, K, V, close, gates, randn, starts_of, walk
from engine_calls import no_call_goes_to_the_engine, pages, vllm_functions  # noqa: F401
from torch import Tensor

from ssmgen.compat import vllm as plugin
from ssmgen.compat.vllm import causal_conv1d_fn

QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
CHANNELS, WIDTH, SLOTS = 2 * HK * K + HV * V, 4, torch.tensor([4, 2, 5, 7], dtype=torch.int32)
STARTED, PAD = torch.tensor([True, True, False, True]), 3


class Step:
    """A layer, its arguments, and a forward context of two decode steps and two prompts, or only the prompts."""

    def __init__(self, steps: int, dtype: torch.dtype, by_windows: bool, checkpoints: bool):
        lengths = ([1, 1] if steps else []) + [66, 5]
        self.lengths, self.tokens, self.steps = lengths, sum(lengths), steps
        self.slots, self.started = SLOTS[4 - len(lengths) :], STARTED[4 - len(lengths) :]
        window = pages(9, WIDTH - 1, CHANNELS, dtype=BF16) if by_windows else pages(9, CHANNELS, WIDTH - 1, dtype=BF16)
        self.window, self.state = window.transpose(1, 2) if by_windows else window, pages(9, HV, V, K, dtype=dtype)
        wide = randn(self.tokens + PAD, CHANNELS + 6, seed=1)
        self.call: dict[str, Tensor] = {
            "mixed_qkv": wide[:, :CHANNELS], "b": randn(self.tokens + PAD, HV, seed=2), "a": randn(self.tokens + PAD, HV, seed=3),
            "core_attn_out": torch.full((self.tokens + PAD, HV, V), 7.0, dtype=BF16),
        }  # fmt: skip
        self.exported: dict[str, Any] = {}
        self.layer = SimpleNamespace(
            prefix="layers.0", kv_cache=(window, self.state), activation="silu", A_log=randn(HV, seed=4, dtype=F32) / 4,
            dt_bias=randn(HV, seed=5, dtype=F32), conv1d=SimpleNamespace(weight=randn(CHANNELS, 1, WIDTH, seed=6) / 2, bias=None),
            chunk_gated_delta_rule=SimpleNamespace(gdn_prefill_backend="flashinfer"),
            _checkpoint_buffer_spec=((3, HV, V, K), dtype),
            _checkpoint_exporter=SimpleNamespace(export=lambda checkpoint, **more: self.exported.update(more, checkpoint=checkpoint)),
        )  # fmt: skip
        starts, tail = starts_of(lengths), starts_of([66, 5])
        plan = SimpleNamespace(every_n_tokens=CHUNK, num_checkpoints=1, cu_starts=torch.tensor([0, 1, 1]), rows=torch.tensor([0]))
        self.metadata = SimpleNamespace(
            spec_sequence_masks=None, num_prefills=2, num_decodes=steps, num_decode_tokens=steps, num_actual_tokens=self.tokens,
            has_initial_state=self.started, non_spec_query_start_loc=starts, non_spec_state_indices_tensor=torch.cat([self.slots, SLOTS]),
            prefill_query_start_loc=tail, prefill_state_indices=self.slots[steps:], prefill_has_initial_state=self.started[steps:],
            flashinfer_checkpoint_plan=plan if checkpoints else None, checkpoint=object(),
        )  # fmt: skip

    def run(self, monkeypatch) -> Any:
        module = import_module(QWEN)
        monkeypatch.setattr(module, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layers.0": self.metadata}))
        monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: self.window.stride(1) != 1)
        return module.QwenGatedDeltaNetAttention._forward_core(self.layer, **self.call)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_step_with_prompts(vllm, monkeypatch, steps, checkpoints, dtype):
    """Decode steps come first. A fresh prompt does not read its slot, other slots and padded rows of the output stay as they are."""
    step = Step(steps, dtype, by_windows=steps > 0, checkpoints=checkpoints)
    window, kept = step.window.clone(), step.state.clone()
    assert step.run(monkeypatch) is None
    call, n, layer = step.call, step.tokens, step.layer
    starts, weight = starts_of(step.lengths), layer.conv1d.weight.squeeze(1)
    mixed = causal_conv1d_fn(
        call["mixed_qkv"][:n].t(), weight, None, window, starts, step.slots, step.started, activation="silu"
    ).t()  # fmt: skip
    assert torch.equal(step.window, window), "the windows are those that the convolution leaves"
    q, k, v = mixed.split([HK * K, HK * K, HV * V], 1)
    tokens = {"q": q.unflatten(1, (HK, K)), "k": k.unflatten(1, (HK, K)), "v": v.unflatten(1, (HV, V))}
    tokens |= {"g": gates(call["a"][:n], layer.A_log, layer.dt_bias), "beta": call["b"][:n].double().sigmoid()}
    for i, (slot, fresh) in enumerate(zip(step.slots.tolist(), (~step.started).tolist(), strict=True)):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        y, each = walk({name: t[rows] for name, t in tokens.items()}, None if fresh else kept[slot], norm=True)
        assert close(call["core_attn_out"][rows], y) and close(step.state[slot], each[-1])
        if checkpoints and step.lengths[i] > CHUNK:
            assert close(step.exported["recurrent_checkpoint"][0], each[CHUNK])
        step.state[slot] = kept[slot]
    assert torch.equal(step.state, kept), "another slot was written"
    assert (call["core_attn_out"][n:] == 7).all()
    if checkpoints:
        assert step.exported["recurrent_state"] is step.state and step.exported["checkpoint"] is step.metadata.checkpoint
        assert torch.equal(step.exported["raw_qkv"], call["mixed_qkv"][:n]) and step.exported["recurrent_rows"].tolist() == [0]
    assert checkpoints or not step.exported


class Drafts(Step):
    """The same prompts, between drafts of three tokens at most: of two sequences, and of one that is padding."""

    def __init__(self, dtype: torch.dtype, checkpoints: bool):
        super().__init__(0, dtype, False, checkpoints)
        counts, room = [3, 2, 1], 3
        self.counts, self.table = counts, torch.tensor([[1, 3, 6], [8, 0, 0], [0, 0, 0]], dtype=torch.int32)
        self.accepted = torch.tensor([2, 1, 1], dtype=torch.int32)
        window = pages(9, CHANNELS, WIDTH - 1 + room - 1, dtype=BF16)
        self.window, self.layer.kv_cache = window, (window, self.state)
        prompts, drafts = self.tokens, sum(counts)
        order = torch.cat([torch.arange(3), torch.arange(3 + 66, 3 + 66 + 2), torch.arange(prompts + 5, prompts + 6)])
        others = torch.tensor([i for i in range(prompts + drafts) if i not in order.tolist()])
        self.tokens += drafts
        wide = randn(self.tokens + PAD, CHANNELS + 6, seed=1)
        self.call = {
            "mixed_qkv": wide[:, :CHANNELS], "b": randn(self.tokens + PAD, HV, seed=2), "a": randn(self.tokens + PAD, HV, seed=3),
            "core_attn_out": torch.full((self.tokens + PAD, HV, V), 7.0, dtype=BF16),
        }  # fmt: skip
        self.order, self.others = order, others
        vars(self.metadata).update(
            spec_sequence_masks=torch.tensor([True, False, True, False, True]), spec_token_indx=order, non_spec_token_indx=others,
            spec_state_indices_tensor=self.table, spec_query_start_loc=starts_of(counts), num_accepted_tokens=self.accepted,
            num_spec_decodes=3, num_actual_tokens=self.tokens,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_step_with_prompts_and_drafts(vllm, monkeypatch, checkpoints, dtype):
    """Prompts are those of a step without drafts, and drafts those of vLLM's functions one after the other."""
    step = Drafts(dtype, checkpoints)
    window, state, call, layer = step.window.clone(), step.state.clone(), step.call, step.layer
    assert step.run(monkeypatch) is None
    weight, out = layer.conv1d.weight.squeeze(1), call["core_attn_out"].clone()
    starts = starts_of(step.counts)
    mixed = plugin.causal_conv1d_update(
        call["mixed_qkv"][step.order].clone(), window, weight, None, "silu", conv_state_indices=step.table[:, 0],
        num_accepted_tokens=step.accepted, query_start_loc=starts, max_query_len=3,
    )  # fmt: skip
    q, k, v = (t.unflatten(1, (-1, size))[None] for t, size in zip(mixed.split([HK * K, HK * K, HV * V], 1), (K, K, V), strict=True))
    drafts, _ = plugin.fused_sigmoid_gating_delta_rule_update(
        layer.A_log, call["a"][step.order], call["b"][step.order], layer.dt_bias, q, k, v, initial_state=state, inplace_final_state=True,
        cu_seqlens=starts, ssm_state_indices=step.table, num_accepted_tokens=step.accepted, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert torch.equal(out[step.order], drafts[0]) and not out[step.order[-1]].any()
    alone = Step(0, dtype, False, checkpoints)
    alone.window, alone.state, alone.layer.kv_cache = window, state, (window, state)
    alone.call |= {n: torch.cat([call[n][step.others], call[n][-PAD:]]) for n in ("mixed_qkv", "a", "b")}
    alone.run(monkeypatch)
    assert torch.equal(out[step.others], alone.call["core_attn_out"][:-PAD]) and (out[step.tokens :] == 7).all()
    assert torch.equal(step.window, window) and torch.equal(step.state, state)
    if checkpoints:
        assert torch.equal(step.exported["raw_qkv"], call["mixed_qkv"][step.others])
        assert torch.equal(step.exported["recurrent_checkpoint"], alone.exported["recurrent_checkpoint"])


@pytest.mark.refused
def test_drafts_that_are_refused_leave_all_as_it_is(vllm, monkeypatch, caplog):
    step = Drafts(F32, False)
    step.metadata.num_accepted_tokens = step.accepted[:2]
    before = [t.clone() for t in (step.window, step.state, step.call["core_attn_out"])]
    assert str(step.run(monkeypatch)).startswith("the engine's") and "num_accepted_tokens is [2]" in caplog.text
    assert all(map(torch.equal, before, (step.window, step.state, step.call["core_attn_out"])))


@pytest.mark.parametrize("why", ["no step", "decode steps beside drafts", "no prompts", "another backend"])
def test_calls_that_are_the_engine_s_own(vllm, monkeypatch, why):
    """Without a warning: they are not replaced here, and the functions that they call are."""
    step = Step(0, F32, False, False)
    changes: dict[str, Any] = {
        "decode steps beside drafts": {"spec_sequence_masks": SLOTS, "num_decodes": 1, "num_decode_tokens": 1},
        "no prompts": {"num_prefills": 0},
    }
    vars(step.metadata).update(changes.get(why, {}))
    if why == "another backend":
        step.layer.chunk_gated_delta_rule.gdn_prefill_backend = "cutedsl"
    if why == "no step":
        step.layer.prefix = "layers.1"
        step.metadata = None
    assert str(step.run(monkeypatch)).startswith("the engine's")


@pytest.mark.refused
@pytest.mark.parametrize("why", ["a pool of another width", "checkpoints of another dtype", "a kept function"])
def test_refused_before_anything_is_written(vllm, monkeypatch, caplog, why):
    step = Step(2, F32, False, checkpoints=why.startswith("checkpoints"))
    if why == "a pool of another width":
        step.layer.kv_cache = (step.layer.kv_cache[0], step.state[..., :24])
    elif why == "a kept function":
        monkeypatch.setitem(plugin._ENGINE.outcome, f"{QWEN}.fi_chunk_gated_delta_rule", "kept")
    else:
        step.layer._checkpoint_buffer_spec = ((3, HV, V, K), BF16)
    before = [t.clone() for t in (step.window, step.state, step.call["core_attn_out"])]
    assert str(step.run(monkeypatch)).startswith("the engine's")
    assert all(map(torch.equal, before, (step.window, step.state, step.call["core_attn_out"])))
    words = {"checkpoints of another dtype": "the dtype of states", "a kept function": "fi_chunk_gated_delta_rule is vllm's own"}
    assert words.get(why, "channels") in caplog.text


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("by_windows", [False, True])
def test_a_decode_step(vllm, monkeypatch, by_windows, dtype):
    """The bits of the two functions that vLLM's method calls. Slot 0 is padding, rows after the step's stay as they are."""
    step = Step(2, dtype, by_windows, False)
    step.metadata.num_actual_tokens, slots = 3, torch.tensor([4, 0, 7, 5], dtype=torch.int32)
    step.metadata.non_spec_state_indices_tensor = slots
    module, call, layer = import_module(QWEN), step.call, step.layer
    monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: not by_windows)
    window, state, out = step.window.clone(), step.state.clone(), torch.full((3, 1, HV, V), 7.0, dtype=BF16)
    for _ in range(2):
        assert module.QwenGatedDeltaNetAttention._forward_core_decode_non_spec(layer, **call, attn_metadata=step.metadata) is None
        mixed = plugin.causal_conv1d_update(
            call["mixed_qkv"][:3].clone(), window, layer.conv1d.weight.squeeze(1), None, "silu", conv_state_indices=slots
        )  # fmt: skip
        plugin.fused_recurrent_gated_delta_rule_packed_decode(
            mixed, call["a"][:3], call["b"][:3], layer.A_log, layer.dt_bias, K**-0.5, state, out, slots[:3], True
        )  # fmt: skip
        assert torch.equal(call["core_attn_out"][:3], out[:, 0]) and not out[1].any() and (call["core_attn_out"][3:] == 7).all()
        assert torch.equal(step.window, window) and torch.equal(step.state, state)


@pytest.mark.parametrize("why", ["activation", "batch-invariant"])
def test_decode_steps_that_are_the_engine_s_own(vllm, monkeypatch, why):
    step, module = Step(2, F32, False, False), import_module(QWEN)
    if why == "activation":
        step.layer.activation = "gelu"
    else:
        monkeypatch.setattr("ssmgen.compat.vllm.gdn.invariance.on", lambda: True)
    method = module.QwenGatedDeltaNetAttention._forward_core_decode_non_spec
    assert method(step.layer, **step.call, attn_metadata=step.metadata).startswith("the engine's")


@pytest.mark.refused
def test_a_refused_decode_step(vllm, monkeypatch, caplog):
    step, module = Step(2, F32, False, False), import_module(QWEN)
    monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: True)
    step.layer.kv_cache = (step.layer.kv_cache[0], step.state[..., :24])
    before = step.window.clone()
    method = module.QwenGatedDeltaNetAttention._forward_core_decode_non_spec
    assert method(step.layer, **step.call, attn_metadata=step.metadata).startswith("the engine's")
    assert "channels" in caplog.text and torch.equal(step.window, before)
