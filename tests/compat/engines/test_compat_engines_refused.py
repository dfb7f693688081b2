"""Calls without an ssmgen kernel go to the engine's own function, which finds all operands unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from delta_oracles import operands as delta_operands
from delta_oracles import states as delta_states
from delta_oracles import vllm_call as delta_vllm_call
from engine_calls import HV, K, V, gdn_operands, no_call_goes_to_the_engine, sglang_functions, vllm_functions  # noqa: F401
from prompt_oracles import sglang_call, vllm_call
from selection import costly
from test_compat_ssu import operands, states
from test_engine_forms import starts_of
from torch import Tensor
from torch_conv import DIM, randn, taps

X, STATE = operands(2), states()
SSU = {n: X[n] for n in ("x", "dt", "A", "B", "C", "D", "dt_bias")} | {"state": STATE, "out": torch.empty(2, 4, 8)}
G = gdn_operands(1, 2)
GDN = {n: G[n] for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
SLOTS, POOL = torch.tensor([1, 2], dtype=torch.int32), randn(4, HV, V, K)
VLLM_GDN = GDN | {"initial_state": POOL, "ssm_state_indices": SLOTS, "cu_seqlens": starts_of([1, 1])}
SGLANG_GDN = GDN | {"initial_state_source": POOL, "initial_state_indices": SLOTS, "cu_seqlens": starts_of([1, 1])}
SGLANG_GDN |= {"softplus_beta": 1.0, "softplus_threshold": 20.0}
WEIGHT, BIAS = taps(4)
CONV = {"x": randn(2, DIM), "conv_state": randn(4, DIM, 3), "weight": WEIGHT, "bias": BIAS}
PACKED = {"x": randn(DIM, 4), "weight": WEIGHT, "bias": BIAS, "conv_states": randn(4, DIM, 3), "query_start_loc": starts_of([2, 2])}
MERGE = {"prefix_output": randn(5, 3, 16), "suffix_output": randn(5, 3, 16), "prefix_lse": randn(3, 5), "suffix_lse": randn(3, 5)}
ROWS = randn(DIM, 4), randn(DIM, 4), -torch.ones(DIM, 2), randn(2, 4), randn(2, 4)
MAMBA1 = dict(zip(("u", "delta", "A", "B", "C"), ROWS, strict=True)) | {
    "ssm_states": randn(4, DIM, 2),
    "query_start_loc": starts_of([2, 2]),
}
KDA = {n: G[n] for n in ("q", "k", "v")} | {"g": randn(1, 2, HV, K), "beta": G["b"].sigmoid(), "initial_state": POOL}
KDA |= {"ssm_state_indices": SLOTS, "cu_seqlens": starts_of([1, 1])}
NORM = {"x": randn(4, 16), "weight": randn(16)}
SIGMOID = "fused_sigmoid_gating_delta_rule_update"


@costly(16)
@pytest.mark.refused
@pytest.mark.parametrize(
    ("engine", "name", "call", "words"),
    [
        ("vllm", "selective_state_update", SSU | {"out": None}, "out is None"),
        ("vllm", "selective_state_update", SSU | {"enable_stochastic_rounding": True}, "rand_seed is given and no written "
            "state is rounded"),
        ("vllm", "selective_state_update", SSU | {"state": STATE[..., ::2]}, "d_state"),
        ("vllm", "causal_conv1d_update", CONV | {"x": CONV["x"].half()}, "conv_state is float32; expected float16, the dtype of x"),
        ("vllm", "causal_conv1d_fn", PACKED | {"x": PACKED["x"].half()}, "conv_states is float32; expected float16, the dtype of x"),
        ("vllm", "fused_recurrent_gated_delta_rule_packed_decode",
         {"mixed_qkv": randn(2, 99), "a": G["a"][0], "b": G["b"][0], "A_log": G["A_log"], "dt_bias": G["dt_bias"], "scale": 1.0,
          "initial_state": POOL, "out": torch.empty(2, 1, HV, V), "ssm_state_indices": SLOTS}, "mixed_qkv has 99 channels"),
        ("vllm", SIGMOID, VLLM_GDN | {"threshold": 10.0}, "softplus has beta 1.0 and threshold 10.0"),
        ("vllm", SIGMOID, VLLM_GDN | {"inplace_final_state": False}, "inplace_final_state is False; "
            "expected True: ssmgen updates the pool in place"),
        ("vllm", SIGMOID, VLLM_GDN | {"ssm_state_indices": None}, "ssm_state_indices is None"),
        ("vllm", SIGMOID, VLLM_GDN | {"num_accepted_tokens": SLOTS}, "num_accepted_tokens is given with ssm_state_indices of one axis"),
        ("vllm", "selective_scan_fn", MAMBA1 | {"initial_state_idx": SLOTS}, "initial_state_idx is given; expected None"),
        ("vllm", "mamba_chunk_scan_combined_varlen", vllm_call(state_dtype=torch.float64), "state_dtype is float64"),
        ("vllm", "chunk_gated_delta_rule", delta_vllm_call(initial_state=delta_states(3)), "initial_states is"),
        ("vllm", "fi_chunk_gated_delta_rule", delta_vllm_call(initial_state=delta_states(4), checkpoint_every_n_tokens=64),
         "checkpoint_every_n_tokens is given without buffers"),
        ("vllm", "fused_recurrent_kda_fwd", KDA | {"scale": 1.0, "inplace_final_state": False}, "inplace_final_state is False; "
            "expected True: ssmgen updates the pool in place"),
        ("vllm", "fused_recurrent_kda_with_safe_gate", KDA | {"compute_gate": True, "g_bias": BIAS}, "a_log is None"),
        ("vllm", "fused_gdn_decode_post_conv_mtp",
         {"mixed_qkv": randn(2, 99), "a": G["a"][0], "b": G["b"][0], "A_log": G["A_log"], "dt_bias": G["dt_bias"],
          "state_indices": SLOTS[:, None], "cu_seqlens": starts_of([1, 1]), "num_accepted_tokens": SLOTS, "state": POOL,
          "output_gate": randn(2, HV, V), "norm_weight": randn(V)}, "mixed_qkv has 99 channels"),
        ("vllm", "layer_norm_fwd", NORM | {"bias": randn(16), "eps": 1e-5, "is_rms_norm": True}, "bias is given"),
        ("vllm", "rms_norm_gated", NORM | {"g": randn(4, 16), "bias": None, "residual": randn(4, 16)}, "residual or prenorm is given"),
        ("vllm", "merge_attn_states", MERGE | {"output": torch.empty(5, 3, 16), "output_scale": torch.ones(1)}, "output_scale"),
        ("sglang", "selective_state_update", SSU | {"enable_stochastic_rounding": True}, "with enable_stochastic_rounding=True; "
            "expected float16"),
        ("sglang", "selective_state_update", SSU | {"intermediate_states_buffer": torch.zeros(2, 3, 4, 8, 16), "cache_steps": 2},
         "cache_steps is 2"),
        ("sglang", "MambaMixer1._selective_scan",
         {"x": randn(4, DIM), "dt": randn(4, DIM), "A": MAMBA1["A"], "B": randn(4, 2), "C": randn(4, 3), "h0": randn(DIM, 2)}, "C is"),
        ("sglang", "mamba_chunk_scan_combined", sglang_call(seq_idx=None), "return_varlen_states is True and seq_idx is None; "
            "expected seq_idx"),
        ("sglang", "chunk_gated_delta_rule", delta_operands(1, 4) | {"initial_state": delta_states(4)}, "initial_state_indices is None"),
        ("sglang", "TritonGDNKernel.extend",
         delta_operands(1, 4) | {"self": None, "ssm_states": delta_states(4), "cache_indices": SLOTS.float(),
                                 "query_start_loc": starts_of([2, 2])}, "cache_indices is float32"),
        ("sglang", "causal_conv1d_update_triton", CONV | {"retrieve_next_token": SLOTS[:, None]}, "for a tree by children"),
        ("sglang", "causal_conv1d_update_triton", CONV | {"cache_seqlens": SLOTS}, "cache_seqlens"),
        ("sglang", "causal_conv1d_fn", PACKED | {"others": SLOTS}, "ssmgen does not know others, and ignores no argument. Leave it out"),
        ("sglang", "mixer2_rms_norm_gated", NORM | {"bias": None, "z": randn(2, 2, 8), "is_rms_norm": True}, "expected as many elements"),
        ("sglang", SIGMOID, SGLANG_GDN | {"intermediate_states_buffer": POOL[None]}, "without intermediate_state_indices"),
        ("sglang", SIGMOID,
         SGLANG_GDN | {"intermediate_states_buffer": POOL[None], "intermediate_state_indices": SLOTS, "cache_steps": 7},
         "cache_steps is 7"),
        ("sglang", SIGMOID, SGLANG_GDN | {"cache_ring": True}, "replayssm_rawv is None with cache_ring=True"),
        ("sglang", SIGMOID, SGLANG_GDN | {"match_cutedsl_decode": True}, "match_cutedsl_decode"),
        ("sglang", SIGMOID, SGLANG_GDN | {"lower_bound": -5.0}, "lower_bound is given; expected None: only KDA's gate has one"),
        ("sglang", SIGMOID, SGLANG_GDN | {"softplus_beta": 2.0}, "softplus_beta is 2.0"),
        ("sglang", SIGMOID, SGLANG_GDN | {"initial_state_source": None}, "initial_state_source is None"),
    ],
)  # fmt: skip
def test_the_engine_does_what_ssmgen_refuses(request, caplog, engine, name, call, words):
    tensors = [t for t in call.values() if isinstance(t, Tensor) and t is not call.get("out") and t is not call.get("output")]
    before = [t.clone() for t in tensors]
    function: Callable = getattr(request.getfixturevalue(engine), name)
    assert function(**call) == function.__wrapped__(**call), "what the stand-in returns"
    assert words in caplog.text and all(map(torch.equal, tensors, before))
