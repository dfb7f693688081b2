"""vLLM's method of OLMo-Hybrid's layers: prompts, decode steps and drafts, against tokens one by one in float64."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delta_oracles import BF16, F32, HK, HV, K, V, close, gates, starts_of, walk
from engine_calls import no_call_goes_to_the_engine, vllm_functions  # noqa: F401
from test_compat_engines_gdn_core import CHANNELS, SLOTS, WIDTH, Drafts, Step
from torch import Tensor

from ssmgen.compat import vllm as plugin
from ssmgen.compat.vllm import causal_conv1d_fn

OLMO = "vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn"


def run(step: Step, monkeypatch, twice: bool = True) -> Any:
    """The method of the layer, which has no backends, and keeps no states inside prompts."""
    module = import_module(OLMO)
    for name in ("chunk_gated_delta_rule", "_checkpoint_buffer_spec", "_checkpoint_exporter"):
        vars(step.layer).pop(name, None)
    step.layer.allow_neg_eigval = twice
    monkeypatch.setattr(module, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layers.0": step.metadata}))
    monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: step.window.stride(1) != 1)
    return module.OlmoHybridGatedDeltaNetAttention._forward_core(step.layer, **step.call)


def tokens_of(step: Step, mixed: Tensor, rows: Tensor | slice, twice: bool) -> dict[str, Tensor]:
    """The recurrence's operands of convolved tokens, with log decays and betas."""
    q, k, v = (t.unflatten(1, (-1, size)) for t, size in zip(mixed.split([HK * K, HK * K, HV * V], 1), (K, K, V), strict=True))
    a, b = step.call["a"][rows], step.call["b"][rows]
    return {"q": q, "k": k, "v": v, "g": gates(a, step.layer.A_log, step.layer.dt_bias), "beta": (1 + twice) * b.double().sigmoid()}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("steps", "twice"), [(0, True), (2, True), (2, False)])
def test_a_step_with_prompts(vllm, monkeypatch, steps, twice, dtype):
    """Decode steps come first."""
    step = Step(steps, dtype, by_windows=steps > 0, checkpoints=False)
    window, kept, n = step.window.clone(), step.state.clone(), step.tokens
    assert run(step, monkeypatch, twice) is None
    starts, weight = starts_of(step.lengths), step.layer.conv1d.weight.squeeze(1)
    mixed = causal_conv1d_fn(
        step.call["mixed_qkv"][:n].t(), weight, None, window, starts, step.slots, step.started, activation="silu"
    ).t()  # fmt: skip
    assert torch.equal(step.window, window)
    x = tokens_of(step, mixed, slice(n), twice)
    for i, (slot, started) in enumerate(zip(step.slots.tolist(), step.started.tolist(), strict=True)):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        y, each = walk({name: t[rows] for name, t in x.items()}, kept[slot] if started else None, norm=True)
        assert close(step.call["core_attn_out"][rows], y) and close(step.state[slot], each[-1])
        step.state[slot] = kept[slot]
    assert torch.equal(step.state, kept) and (step.call["core_attn_out"][n:] == 7).all()


@pytest.mark.parametrize("by_windows", [False, True])
def test_a_decode_step(vllm, monkeypatch, by_windows):
    """Slot 0 is padding; rows after the step's stay as they are."""
    step, slots = Step(2, F32, by_windows, False), torch.tensor([4, 0, 7, 5], dtype=torch.int32)
    vars(step.metadata).update(num_prefills=0, num_decodes=3, num_decode_tokens=3, num_actual_tokens=3)
    step.metadata.non_spec_state_indices_tensor = slots
    window, kept = step.window.clone(), step.state.clone()
    assert run(step, monkeypatch) is None
    weight = step.layer.conv1d.weight.squeeze(1)
    mixed = plugin.causal_conv1d_update(
        step.call["mixed_qkv"][:3].clone(), window[..., : WIDTH - 1], weight, None, "silu", conv_state_indices=slots
    )  # fmt: skip
    x = tokens_of(step, mixed, slice(3), True)
    for i, slot in enumerate((4, 0, 7)):
        if slot:
            y, each = walk({name: t[i : i + 1] for name, t in x.items()}, kept[slot], norm=True)
            assert close(step.call["core_attn_out"][i], y[0]) and close(step.state[slot], each[-1])
            step.state[slot] = kept[slot]
    assert torch.equal(step.state, kept) and torch.equal(step.window, window)
    assert not step.call["core_attn_out"][1].any() and (step.call["core_attn_out"][3:] == 7).all()


@pytest.mark.parametrize("prompts", [False, True])
def test_drafts(vllm, monkeypatch, prompts):
    """Alone, and with prompts between them: the states after each token go to the columns of the table."""
    step = Drafts(F32, False)
    rows, n = step.order, step.tokens
    if not prompts:
        rows, n = torch.arange(6), 6
        vars(step.metadata).update(num_prefills=0, num_actual_tokens=6, spec_token_indx=None, non_spec_token_indx=None)
    window, kept = step.window.clone(), step.state.clone()
    assert run(step, monkeypatch) is None
    starts, weight = starts_of(step.counts), step.layer.conv1d.weight.squeeze(1)
    mixed = plugin.causal_conv1d_update(
        step.call["mixed_qkv"][rows].clone(), window, weight, None, "silu", conv_state_indices=step.table[:, 0],
        num_accepted_tokens=step.accepted, query_start_loc=starts, max_query_len=3,
    )  # fmt: skip
    x, out = tokens_of(step, mixed, rows, True), step.call["core_attn_out"]
    for i, count in enumerate(step.counts):
        begin, first = int(starts[i]), int(step.table[i, int(step.accepted[i]) - 1])
        if not first:
            assert not out[rows[begin : begin + count]].any()
            continue
        y, each = walk({name: t[begin : begin + count] for name, t in x.items()}, kept[first], norm=True)
        assert close(out[rows[begin : begin + count]], y)
        for t, slot in enumerate(step.table[i, :count].tolist()):
            assert not slot or close(step.state[slot], each[t + 1])
    assert (out[n:] == 7).all() and torch.equal(step.state[0], kept[0])


@pytest.mark.parametrize("why", ["no step", "nothing", "drafts in the mode", "states inside prompts"])
def test_steps_that_are_the_engine_s_own(vllm, monkeypatch, why):
    step = Drafts(F32, False) if why.startswith("drafts") else Step(0, F32, False, why.startswith("states"))
    if why == "no step":
        step.metadata = None
    elif why == "nothing":
        step.metadata.num_prefills = 0
    elif why == "drafts in the mode":
        monkeypatch.setattr("ssmgen.compat.vllm.gdn.invariance.on", lambda: True)
    assert str(run(step, monkeypatch)).startswith("the engine's")


@pytest.mark.refused
@pytest.mark.parametrize("prompts", [False, True])
def test_refused_before_anything_is_written(vllm, monkeypatch, caplog, prompts):
    step = Step(2, F32, False, False)
    if not prompts:
        vars(step.metadata).update(num_prefills=0, num_actual_tokens=2, non_spec_state_indices_tensor=SLOTS)
    step.layer.kv_cache = (step.window, step.state[..., :24])
    before = [t.clone() for t in (step.window, step.state, step.call["core_attn_out"])]
    assert str(run(step, monkeypatch)).startswith("the engine's") and "channels" in caplog.text
    assert all(map(torch.equal, before, (step.window, step.state, step.call["core_attn_out"]))) and step.window.shape[1] == CHANNELS
