"""Every prompt function of the engines asks its kernel to keep sequences whole in a batch-invariant mode."""

from __future__ import annotations

import delta_oracles
import mamba1_oracles
import prompt_oracles
import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, pages, vllm_functions  # noqa: F401
from test_compat_engines_gdn_core import Step

from ssmgen.compat import sglang, vllm
from ssmgen.compat.sglang.delta import extend
from ssmgen.compat.sglang.mamba import selective_scan
from ssmgen.compat.shared import invariance
from ssmgen.errors import ArgumentError

F32, BF16 = torch.float32, torch.bfloat16
randn = prompt_oracles.randn


@pytest.fixture(autouse=True)
def impossible(monkeypatch):
    """A number of segments that every operator refuses, instead of one."""
    monkeypatch.setattr(invariance, "whole", lambda function: {"segments": 0})


def kda(gate: str, beta: str) -> dict:
    x = {n: randn(1, 70, 2, 32, seed=i) for i, n in enumerate(("q", "k", "v", gate))} | {beta: randn(1, 70, 2, seed=5)}
    return x | ({} if gate == "g" else {"A_log": randn(2, seed=6, dtype=F32), "g_bias": None})


def pool(call: dict) -> dict:
    return call | {"initial_state": torch.zeros(2, 2, 32, 32), "initial_state_indices": torch.zeros(1, dtype=torch.int32)}


ROWS = {n: randn(9, 8 if n in ("x", "dt") else 16, seed=1) for n in ("x", "dt", "B", "C")}
CALLS = {
    "vllm's Mamba-2": lambda: vllm.mamba_chunk_scan_combined_varlen(**prompt_oracles.vllm_call()),
    "vllm's Mamba-2 in a pool": lambda: vllm.mamba_chunk_scan_combined_varlen(
        **prompt_oracles.vllm_call(final_states_out=pages(9, *prompt_oracles.POOL), final_state_indices=prompt_oracles.SLOTS)
    ),
    "vllm's Mamba-1": lambda: vllm.selective_scan_fn(**mamba1_oracles.vllm_call()),
    "vllm's gated delta rule": lambda: vllm.chunk_gated_delta_rule(**delta_oracles.vllm_call()),
    "vllm's FlashInfer": lambda: vllm.fi_chunk_gated_delta_rule(
        **delta_oracles.vllm_call(initial_state=delta_oracles.states(4), output_final_state=True)
    ),
    "vllm's KDA": lambda: vllm.chunk_kda(**kda("g", "beta")),
    "vllm's KDA of raw gates": lambda: vllm.chunk_kda_with_fused_gate(**kda("raw_g", "raw_beta")),
    "vllm's KDA of GLM": lambda: vllm.chunk_kda_with_safe_gate(**kda("raw_g", "beta")),
    "Lightning": lambda: vllm.lightning_attention(*(randn(1, 2, 70, 32, seed=i) for i in range(3)), torch.ones(2)),
    "sglang's Mamba-2": lambda: sglang.mamba_chunk_scan_combined(**prompt_oracles.sglang_call()),
    "sglang's Mamba-1": lambda: selective_scan(A=-torch.ones(8, 16), h0=torch.zeros(8, 16), **ROWS),
    "sglang's gated delta rule": lambda: sglang.chunk_gated_delta_rule(
        **delta_oracles.sglang_call(initial_state=pages(9, *delta_oracles.POOL))
    ),
    "sglang's method": lambda: extend(None, **delta_oracles.extend_call(pages(9, *delta_oracles.POOL))),
    "sglang's KDA": lambda: sglang.chunk_kda(**pool(kda("g", "beta"))),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_prompts_are_kept_whole(call):
    with pytest.raises(ArgumentError, match="segments"):
        call()


@pytest.mark.refused
def test_vllm_s_layer_keeps_prompts_whole(vllm, monkeypatch, caplog):
    Step(2, F32, False, False).run(monkeypatch)
    assert "segments" in caplog.text
