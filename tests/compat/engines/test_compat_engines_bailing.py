"""vLLM's function for steps with prompts of Bailing 2.5's Lightning attention, against tokens one by one in float64."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, pages, vllm_functions  # noqa: F401
from test_engine_forms import starts_of
from torch import Tensor
from torch_conv import F32, randn

from ssmgen.compat import vllm as plugin

BAILING = "vllm.model_executor.layers.mamba.linear.bailing_linear_attn"
BF16, H, K, SLOTS = torch.bfloat16, 2, 16, torch.tensor([3, 6, 1, 5], dtype=torch.int32)


class Step:
    """Packed rows of two decode steps, or none, and of two prompts: one of 70 tokens that goes on, one of 5 that is new."""

    def __init__(self, steps: int, dtype: torch.dtype = F32, states: torch.dtype = F32, own: bool = True):
        lengths, before = [1] * steps + [70, 5], [9] * steps + [64, 0]
        self.lengths, self.slots, tokens = lengths, SLOTS[2 - steps :], sum(lengths)
        self.q, self.k, self.v = (randn(tokens, H, K, seed=s).to(dtype) / 2 for s in range(3))
        self.pool, self.slope = pages(8, H, K, K, dtype=states), torch.tensor([0.25, 0.02]).view(H, 1, 1)
        self.metadata = SimpleNamespace(
            num_decodes=steps, num_decode_tokens=steps, num_prefills=2, query_start_loc=starts_of(lengths),
            seq_lens=torch.tensor([n + b for n, b in zip(lengths, before, strict=True)], dtype=torch.int32),
        )  # fmt: skip
        if own:
            self.metadata.state_indices_tensor_p = self.slots[steps:]
        self.before = before

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slots: Tensor, metadata: Any) -> Tensor:
        """The layer's own function for decode steps, whose kernel is replaced."""
        n = metadata.num_decode_tokens
        rows = (t[:n, :, None] for t in (q, k, v))
        return plugin.linear_decode_forward_triton(*rows, pool, self.slope, slots[:n])

    def run(self) -> Tensor:
        module, given = import_module(BAILING), (self.pool, self.slots, self.metadata)
        module.clear_linear_attention_cache_for_new_sequences(*given)
        return module.linear_attention_prefill_and_mix(
            q=self.q, k=self.k, v=self.v, kv_cache=self.pool, state_indices_tensor=self.slots, attn_metadata=self.metadata,
            slope_rate=self.slope, block_size=256, decode_fn=self.decode, prefix_fn=None, layer_idx=3,
        )  # fmt: skip


@pytest.mark.parametrize(("dtype", "states"), [(F32, F32), (BF16, F32), (F32, BF16)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_with_prompts(vllm, steps, own, dtype, states):
    step = Step(steps, dtype, states, own)
    kept, decay = step.pool.clone(), (-step.slope.double()).exp()
    out, starts = step.run(), step.metadata.query_start_loc.tolist()
    assert out.dtype == dtype and out.shape == (sum(step.lengths), H * K)
    for i, slot in enumerate(step.slots.tolist()):
        S = kept[slot].double() if step.before[i] else torch.zeros(H, K, K, dtype=torch.float64)
        for t in range(starts[i], starts[i + 1]):
            S = decay * S + step.k[t].double()[:, :, None] * step.v[t].double()[:, None]
            want = (step.q[t].double()[:, :, None] * S).sum(1)
            assert (out[t].view(H, K).double() - want).abs().max() <= (want.abs().max() + 1) * (torch.finfo(dtype).eps + 1e-5)
        assert (step.pool[slot].double() - S).abs().max() <= (S.abs().max() + 1) * (torch.finfo(states).eps + 1e-5)
        step.pool[slot] = kept[slot]
    assert torch.equal(step.pool, kept), "another slot was written"


@pytest.mark.refused
@pytest.mark.parametrize("why", ["slots", "a kept function"])
def test_states_of_new_sequences_are_cleared_for_vllm_s_own(vllm, monkeypatch, caplog, why):
    """Ours leaves that out, so the engine's function that clears runs before the engine's function that scans."""
    step, module, cleared = Step(2), import_module(BAILING), []
    if why == "slots":
        step.metadata.state_indices_tensor_p = step.slots[2:].float()
    else:
        monkeypatch.setitem(plugin._ENGINE.outcome, "vllm.model_executor.layers.lightning_attn.lightning_attention", "kept")
    clear = module.clear_linear_attention_cache_for_new_sequences
    monkeypatch.setattr(clear, "__wrapped__", lambda *given: cleared.append(given))
    before = step.pool.clone()
    assert str(step.run()).startswith("the engine's") and torch.equal(step.pool, before)
    assert cleared == [(step.pool, step.slots, step.metadata)]
    assert ("state indices is float32" if why == "slots" else "lightning_attention is vllm's own") in caplog.text
