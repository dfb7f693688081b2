"""Prompts of gated delta rules: the kernels built for models are the kernels that this package and the engines' drop-ins request."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ssmgen
from ssmgen.compat import vllm
from ssmgen.compat.sglang import delta as sglang_delta
from ssmgen.compat.shared import delta_prompts
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.select.models import Role, Wanted, find_model
from ssmgen.spec.kernel import DType, Index

BF16, F32 = torch.bfloat16, torch.float32


def whole(asked) -> list[DeltaProblem]:
    """Problems of whole sequences. If heads are few, each is also requested for sequences in segments."""
    cut = [problem for problem in asked if problem.divided]
    left = [problem for problem in asked if not problem.divided]
    assert len(cut) in (0, len(left)) and {replace(problem, segments=1, segment_chunks=1) for problem in cut} in (set(), set(left))
    return left


def posed(model, monkeypatch: pytest.MonkeyPatch, states: torch.dtype = F32) -> dict[str, object]:
    """{who calls: the problem}, of two packed sequences. The engines' gates and betas are f32."""
    problems: dict[str, object] = {}

    def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def poses(who, function, **call) -> None:
        def record(*args, **kwargs):
            problems[who] = ssmgen.chunk_gated_delta_rule.build(*args, **kwargs).problem()[0]

        monkeypatch.setattr(delta_prompts, "chunk_gated_delta_rule", record)
        (record if function is None else function)(**call)

    K, V, starts = model.dim_k, model.dim_v, torch.tensor([0, 64, 128]).int()
    row = {"q": zeros(1, 128, 2, K), "k": zeros(1, 128, 2, K), "v": zeros(1, 128, 2, V), "g": zeros(1, 128, 2, dtype=F32)}
    pool, slots = zeros(3, 2, V, K, dtype=states), torch.tensor([1, 2]).int()
    own = {"use_qk_l2norm": True, "cu_seqlens": starts, "state": pool, "state_indices": slots, "has_initial_state": slots > 0}
    poses("own", None, **row, beta=zeros(1, 128, 2), **own)
    if not model.allow_neg_eigval:
        raw = {"g": zeros(1, 128, 2), "beta": zeros(1, 128, 2), "A_log": zeros(2, dtype=F32), "dt_bias": zeros(2), "beta_sigmoid": True}
        poses("vllm's pool", None, **row | raw, **own)
        if states == F32:
            places = {"checkpoint_positions": torch.tensor([64, 128]), "checkpoints_out": zeros(2, 2, V, K, dtype=F32)}
            poses("vllm's pool, checkpoints", None, **row | raw, **own, **places)
    engine = row | {"beta": zeros(1, 128, 2, dtype=F32)}
    backend = engine | {"self": None, "ssm_states": pool, "cache_indices": slots, "query_start_loc": starts}
    poses("sglang", sglang_delta.extend, **backend)
    tracked = {"track_state": zeros(2, 2, V, K, dtype=F32), "track_chunk_idx": slots}
    poses("sglang's tracked", sglang_delta.extend, **backend, **tracked)
    gathered = engine | {"cu_seqlens": starts, "initial_state": pool[:2], "output_final_state": True, "use_qk_l2norm_in_kernel": False}
    poses("vllm", vllm.chunk_gated_delta_rule, **gathered)
    poses("vllm by FlashInfer", vllm.fi_chunk_gated_delta_rule, **gathered)
    poses("vllm's OLMo-Hybrid", vllm.chunk_gated_delta_rule, **gathered | {"use_qk_l2norm_in_kernel": True})
    kept = {"state_checkpoints": zeros(2, 2, V, K, dtype=F32), "checkpoint_cu_starts": torch.arange(3), "checkpoint_every_n_tokens": 64}
    poses("vllm's checkpoints", vllm.fi_chunk_gated_delta_rule, **gathered, **kept)
    return problems


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "olmo-hybrid-7b"])
@pytest.mark.parametrize("state", [DType.F32, DType.BF16])
def test_prompts_of_engines(name, state, monkeypatch):
    """vLLM's states become f32, for pools of every dtype."""
    model = find_model(name)
    found = posed(model, monkeypatch, BF16 if state is DType.BF16 else F32)
    asked = whole(model.asked(Wanted(indices=(Index.I32,), states=(state,), intermediates=True), Role.SCAN))
    assert set(asked) == set(found.values()) and len(asked) == len(set(asked))
    plain = whole(model.asked(Wanted(indices=(Index.I32,), states=(state,)), Role.SCAN))
    kept = {problem for who, problem in found.items() if "checkpoints" in who or "tracked" in who}
    assert set(asked) - set(plain) == kept


def test_prompts_in_batches():
    model = find_model("qwen3-next-80b-a3b")
    first, later = whole(model.asked(Wanted(indices=(Index.NONE,)), Role.SCAN))
    assert not first.ragged and first.final and not first.pool and later == replace(first, initial=True)
