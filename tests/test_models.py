"""The table of models: their rows, their shares, and that what is built for them is what their calls ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ssmgen
from ssmgen.errors import ModelError
from ssmgen.kernels import OPERATOR_OF
from ssmgen.kernels.linear_attention_problem import Layout, Ring
from ssmgen.models import LinearAttention, Mamba, find_model, models
from ssmgen.spec import DType, Index, PoolMode

BF16, F32 = torch.bfloat16, torch.float32
LINEAR = [m for m in models().values() if isinstance(m, LinearAttention)]


def test_the_table_is_sound():
    table = models()
    assert len(table) > 50 and table["nemotron-h-8b"].nheads == 128 and table["qwen3-next-80b-a3b"].key_heads == 16
    for model in table.values():
        rows, elements, groups = model.shape
        assert model.nheads % groups == 0 and rows > 0 and elements > 0 and model.source
        assert model.function in ssmgen.__all__
        for problem in model.problems():
            assert not problem.faults() and OPERATOR_OF[type(problem)] == model.operator


def test_every_kind_has_models():
    assert {m.kind for m in models().values()} == {"mamba1", "mamba2", "gated_delta_rule", "kda", "lightning_attn", "rwkv7"}
    assert find_model("olmo-hybrid-7b").shape == (192, 96, 30)
    assert isinstance(find_model("mamba-130m"), Mamba) and find_model("mamba-130m").gate


def test_tensor_parallel_division():
    rank = find_model("nemotron-h-8b").divided(8)
    assert (rank.nheads, rank.ngroups, rank.headdim) == (16, 1, 64)
    assert find_model("mamba2-2.7b").divided(4).ngroups == 1, "groups that cannot be divided are replicated"
    assert find_model("falcon-mamba-7b").divided(2).headdim == 4096
    with pytest.raises(ModelError, match="80 heads, which 3 ranks"):
        find_model("mamba2-2.7b").divided(3)
    with pytest.raises(ModelError, match="nemotron-h-8b"):
        find_model("nemotron")


def test_value_and_key_heads_divide():
    rank = find_model("qwen3.5-397b-a17b").divided(8)
    assert (rank.nheads, rank.key_heads, rank.dim_k, rank.dim_v) == (8, 2, 128, 128)
    assert find_model("kimi-k3").divided(8).nheads == 12
    with pytest.raises(ModelError, match="16 key heads, which 32 ranks"):
        find_model("qwen3.5-397b-a17b").divided(32)
    with pytest.raises(ModelError, match="30 heads, which 4 ranks"):
        find_model("olmo-hybrid-7b").divided(4)


def test_choices_multiply():
    assert {p.state for p in find_model("mamba-130m").problems(states=(DType.BF16, DType.F32))} == {DType.BF16, DType.F32}
    problems = find_model("kimi-k3").problems(indices=tuple(Index), pools=tuple(PoolMode), layout=Layout.KV)
    assert len(problems) == 5 and all(p.interleaved for p in problems), "a split pool has indices"


# What is built ahead of time must be what a call will look for: the same problem, field by field.


def call_of(model: LinearAttention, tokens: int | None, state_type: torch.dtype = F32, **more) -> tuple:
    """(function, keywords) of a call as serving engines make it, with as few slots as can be."""
    B, HV, HK, K, V = 2, model.nheads, model.key_heads, model.dim_k, model.dim_v
    lead = (B,) if tokens is None else (B, tokens)
    x = {"q": (HK, K), "k": (HK, K), "v": (HV, V)}
    gates = {
        "gated_delta_rule": {"g": (HV,), "beta": (HV,)},
        "kda": {"g": (HV, K), "beta": (HV,)},
        "lightning_attn": {},
        "rwkv7": {"w": (HV, K), "kk": (HV, K), "a": (HV, K)},
    }[model.kind]
    call = {name: torch.empty(*lead, *shape, dtype=BF16) for name, shape in (x | gates).items()}
    if model.kind == "rwkv7":
        call["r"] = call.pop("q")
    elif model.kind == "lightning_attn":
        call["slope"] = torch.empty(HV)
    else:
        call |= weights(model)
    call["state"] = torch.empty(B, HV, V, K, dtype=state_type)
    return getattr(ssmgen, model.function), call | more


def weights(model: LinearAttention) -> dict:
    channels = model.kind == "kda"
    bias = torch.empty(model.nheads * model.dim_k) if channels else torch.empty(model.nheads, dtype=BF16)
    bound = {"lower_bound": -5.0} if model.gate.value == "bounded" else {}
    options = {"use_qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": model.allow_neg_eigval}
    return {"A_log": torch.empty(model.nheads), "dt_bias": bias, **options, **bound}


def posed(function, call):
    return ssmgen.explain(function, **call, arch="sm_90a").problem


SLOTS = {"state_indices": torch.zeros(2, dtype=torch.int32)}


@pytest.mark.parametrize("model", LINEAR, ids=lambda m: m.name)
def test_one_token(model):
    assert model.problems() == [posed(*call_of(model, None)), posed(*call_of(model, None, **SLOTS))]


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "kimi-k3", "minimax-text-01", "rwkv7-0.1b"])
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_several_tokens(name, tokens):
    model = replace(find_model(name), nheads=4, key_heads=4)
    kept = {"intermediate_states": torch.empty(2, tokens, 4, model.dim_v, model.dim_k)}
    assert model.problem(DType.F32, Index.I32, PoolMode.SINGLE, tokens=tokens) == posed(*call_of(model, tokens, **SLOTS))
    with_kept = model.problem(DType.F32, Index.I32, PoolMode.SINGLE, tokens=tokens, intermediates=True)
    assert with_kept == posed(*call_of(model, tokens, **SLOTS, **kept))
    verify = model.problem(DType.BF16, Index.I32, PoolMode.SINGLE, tokens=tokens, update_state=False)
    assert verify == posed(*call_of(model, tokens, BF16, **SLOTS, update_state=False))
    assert verify.frozen == (name == "qwen3-next-80b-a3b" and tokens == 4)


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "kimi-k3"])
def test_rings_and_commits(name):
    model = replace(find_model(name), nheads=4, key_heads=4)
    function, call = call_of(model, 4, BF16, **SLOTS, update_state=False)
    ring = ssmgen.Ring(**{n: torch.empty(2, *call[n].shape[1:], dtype=BF16) for n in ("k", "v", "g", "beta")})
    store = model.problem(DType.BF16, Index.I32, PoolMode.SINGLE, tokens=4, update_state=False, ring=Ring.STORE)
    assert store == posed(function, call | {"ring": ring})
    commit = model.problem(DType.BF16, Index.I32, PoolMode.SINGLE, ring=Ring.COMMIT)
    replayed = {"state": call["state"], "ring": ring, "num_accepted_tokens": SLOTS["state_indices"], **SLOTS, **weights(model)}
    assert commit == posed(getattr(ssmgen, f"{model.function}_commit"), replayed)


def test_layout_and_split_pool():
    model = find_model("olmo-hybrid-7b")
    function, call = call_of(model, None, **SLOTS, dst_state_indices=torch.ones(2, dtype=torch.int32), state_layout="kv")
    call["state"] = call["state"].transpose(2, 3).contiguous()
    assert model.problem(DType.F32, Index.I32, PoolMode.SPLIT, layout=Layout.KV) == posed(function, call)


@pytest.mark.parametrize("name", ["mamba-130m", "nemotron-h-8b", "falcon-h1-7b"])
def test_mamba(name):
    model = find_model(name)
    B, H, P, N, G = 2, model.nheads, model.headdim, model.d_state, model.ngroups
    tied = model.kind == "mamba2"
    bias = torch.empty(H, dtype=BF16)[:, None].expand(H, P) if tied else torch.empty(H, P)
    dt = torch.empty(B, H, dtype=BF16)[:, :, None].expand(B, H, P) if tied else torch.empty(B, H, P, dtype=BF16)
    A = torch.empty(H)[:, None, None].expand(H, P, N) if tied else torch.empty(H, P, N)
    x, BC = torch.empty(B, H, P, dtype=BF16), torch.empty(B, G, N, dtype=BF16)
    call = {"state": torch.empty(B, H, P, N), "x": x, "dt": dt, "A": A, "B": BC, "C": BC, "D": torch.empty(H, P, dtype=BF16)}
    call |= {"z": x if model.gate else None, "dt_bias": bias, "dt_softplus": True}
    want = [posed(ssmgen.selective_state_update, call | more) for more in ({}, SLOTS)]
    assert model.problems() == want
