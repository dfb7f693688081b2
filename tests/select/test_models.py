"""The table of models: their rows and shares; the kernels built for them are the kernels that their calls request."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import ssmgen
from ssmgen.calls.checks import DTYPES
from ssmgen.engine.recurrences.attention.problem import Gate, Layout, Ring
from ssmgen.errors import ModelError
from ssmgen.families.causal_conv1d.spec import ConvLayout, ConvProblem
from ssmgen.families.causal_conv1d_update.spec import StateLayout
from ssmgen.families.linear_attention.models import LinearAttention
from ssmgen.families.selective_state_update.models import Mamba
from ssmgen.select.catalog import OPERATOR_OF
from ssmgen.select.models import find_model, models
from ssmgen.spec.kernel import DType, Index, PoolMode

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
        assert not any(problem.faults() for problem in (*model.convolutions(), *model.norms(), *model.layers()))


def test_every_kind_has_models():
    assert {m.kind for m in models().values()} == {"mamba1", "mamba2", "mamba3", "gated_delta_rule", "kda", "lightning_attn", "rwkv7"}
    assert find_model("olmo-hybrid-7b").shape == (192, 96, 30)
    assert isinstance(find_model("mamba-130m"), Mamba) and find_model("mamba-130m").gate


def test_tensor_parallel_division():
    rank = find_model("nemotron-h-8b").divided(8)
    assert (rank.nheads, rank.ngroups, rank.headdim) == (16, 1, 64)
    assert find_model("mamba2-2.7b").divided(4).ngroups == 1, "groups that cannot be divided are replicated"
    assert find_model("falcon-mamba-7b").divided(2).headdim == 4096
    with pytest.raises(ModelError, match="80 heads for 3 ranks"):
        find_model("mamba2-2.7b").divided(3)
    with pytest.raises(ModelError, match="nemotron-h-8b"):
        find_model("nemotron")


def test_value_and_key_heads_divide():
    rank = find_model("qwen3.5-397b-a17b").divided(8)
    assert (rank.nheads, rank.key_heads, rank.dim_k, rank.dim_v) == (8, 2, 128, 128)
    assert find_model("kimi-k3").divided(8).nheads == 12
    with pytest.raises(ModelError, match="16 key heads for 32 ranks"):
        find_model("qwen3.5-397b-a17b").divided(32)
    with pytest.raises(ModelError, match="30 heads for 4 ranks"):
        find_model("olmo-hybrid-7b").divided(4)


def test_choices_multiply():
    assert {p.state for p in find_model("mamba-130m").problems(states=(DType.BF16, DType.F32))} == {DType.BF16, DType.F32}
    problems = find_model("kimi-k3").problems(indices=tuple(Index), pools=tuple(PoolMode), layout=Layout.KV)
    assert len(problems) == 5 and all(p.interleaved for p in problems), "a split pool has indices"


# A kernel built at install time must match a later call's problem, field by field.


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
    if not tied:
        with pytest.raises(ModelError, match="one token at a time"):
            model.problems(tokens=4)
        return
    several = {n: None if call[n] is None else call[n][:, None].expand(B, 4, *call[n].shape[1:]) for n in ("x", "dt", "B", "C", "z")}
    kept = {"intermediate_states": torch.empty(B, 4, H, P, N), "update_state": False}
    want = [posed(ssmgen.selective_state_update, call | several | more) for more in (SLOTS, SLOTS | kept)]
    found = model.problem(DType.F32, Index.I32, PoolMode.SINGLE, tokens=4)
    assert [found, model.problem(DType.F32, Index.I32, PoolMode.SINGLE, tokens=4, intermediates=True, update_state=False)] == want


# Convolutions.


def test_channels_of_the_convolutions():
    channels = {"mamba-130m": 1536, "nemotron-h-8b": 10240, "qwen3.5-397b-a17b": 12288, "kimi-linear-48b-a3b": 4096, "rwkv7-0.1b": 0}
    assert {name: find_model(name).conv_channels for name in channels} == channels
    assert find_model("nemotron-h-8b").divided(8).conv_channels == 10240 // 8
    assert find_model("minimax-text-01").convolutions() == []
    assert all(m.conv_channels % 8 == 0 for m in models().values()), "vectors suffice"


@pytest.mark.parametrize("io", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mamba-130m", "qwen3-next-80b-a3b"])
def test_prompts(name, io):
    model = find_model(name)
    D, W = 64, model.conv_width
    taps = {"weight": torch.empty(D, W, dtype=io), "bias": torch.empty(D, dtype=io) if model.conv_bias else None, "activation": "silu"}
    starts = torch.tensor([0, 5, 9], dtype=torch.int32)
    pool = {"query_start_loc": starts, "conv_states": torch.empty(2, D, W - 1, dtype=io), "has_initial_state": torch.ones(2).bool()}
    slots = {"conv_state_indices": torch.zeros(2, dtype=torch.int32)}
    aligned, odd = torch.empty(2, D, 16, dtype=io), torch.empty(2, D, 9, dtype=io)
    last, packed = torch.empty(2, 9, D, dtype=io).transpose(1, 2), torch.empty(9, D, dtype=io).t()
    calls = [{"x": x} for x in (aligned, odd, last)] + [{"x": x, **pool, **more} for x in (odd[0], packed) for more in ({}, slots)]
    wanted = [posed(ssmgen.causal_conv1d, taps | call) for call in calls]
    found = [p for p in model.convolutions(io=DTYPES[io]) if isinstance(p, ConvProblem)]
    assert found == wanted and {p.layout for p in found} == set(ConvLayout)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("name", ["mamba-130m", "kimi-k3"])
def test_decoding_steps(name, tokens):
    model = find_model(name)
    D, W, io = 64, model.conv_width, BF16
    x = torch.empty(2, D, dtype=io) if tokens == 1 else torch.empty(2, tokens, D, dtype=io).transpose(1, 2)
    call = {"x": x, "weight": torch.empty(D, W, dtype=io), "bias": torch.empty(D, dtype=io) if model.conv_bias else None}
    call |= {"activation": "silu"} | ({"num_accepted_tokens": torch.ones(2).int()} if tokens > 1 else {})
    entries = W + tokens - 2
    runs = [torch.empty(2, D, n, dtype=io) for n in (entries, W)[: 2 if tokens == 1 else 1]]
    states = *runs, torch.empty(2, entries, D, dtype=io).transpose(1, 2)
    slots = {"conv_state_indices": torch.zeros(2, dtype=torch.int32)}
    wanted = [posed(ssmgen.causal_conv1d_update, call | {"conv_state": s} | more) for s in states for more in ({}, slots)]
    assert [p for p in model.convolutions(tokens=tokens) if not isinstance(p, ConvProblem)] == wanted


def test_widths_may_differ():
    assert {p.width for p in replace(find_model("mamba-130m"), conv_width=3).convolutions()} == {3}


def test_norms():
    def norms(name: str, tp: int = 1) -> list[tuple]:
        return [(p.size, p.grouped, p.norm_first, p.activation.value) for p in find_model(name).divided(tp).norms()]

    assert norms("nemotron-h-8b") == norms("nemotron-h-8b", 4) == [(1024, True, False, "silu")]
    assert norms("nemotron-h-8b", 8) == [(1024, False, False, "silu")]
    assert norms("mamba2-2.7b") == [(5120, False, False, "silu")] and norms("mamba2-2.7b", 2) == [], "a group of two ranks"
    assert norms("qwen3.5-397b-a17b") == [(128, True, True, "silu")] and norms("kimi-linear-48b-a3b") == [(128, True, True, "sigmoid")]
    assert norms("falcon-h1-7b") == norms("mamba-130m") == norms("rwkv7-1.5b") == norms("minimax-text-01") == []


def test_layers():
    def layers(name: str, tp: int = 1, **call) -> set[tuple]:
        found = find_model(name).divided(tp).layers(indices=(Index.I32,), **call)
        return {(p.norm.size, p.norm_groups, p.norm.first, p.norm.weight is not None) for p in found}

    assert layers("nemotron-h-8b") == {(1024, 8, False, True)} and layers("nemotron-h-8b", 8) == {(1024, 1, False, True)}
    assert layers("mamba2-2.7b", 2) == {(0, 0, False, False)}, "the norm's group is two ranks'"
    assert layers("qwen3.5-397b-a17b") == {(128, 64, True, True)}
    gated = find_model("falcon-h1-7b").layers()
    assert all(p.z is DType.BF16 and p.norm.weight is None for p in gated) and find_model("nemotron-h-8b").layers()[0].z is None
    assert {(p.conv.layout, p.conv.len) for p in gated} == {(StateLayout.RUNS, 3), (StateLayout.RUNS, 4), (StateLayout.CHANNELS, 3)}
    assert {(p.state, p.index) for p in find_model("qwen3.5-397b-a17b").layers(tuple(DType))} == set(
        product(DType, (Index.NONE, Index.I32))
    )
    assert {p.layout for p in find_model("qwen3.5-397b-a17b").layers(layout=Layout.KV)} == {Layout.KV}
    assert layers("kimi-linear-48b-a3b") == {(128, 32, True, True)} and find_model("kimi-k3").layer_channels == 3 * 96 * 128
    assert {p.gate for p in find_model("kimi-k3").layers()} == {Gate.BOUNDED}
    for name in ("mamba-130m", "rwkv7-1.5b", "minimax-text-01"):
        assert find_model(name).layer_function is None and find_model(name).layers() == []


@pytest.mark.parametrize("length", [3, 4], ids="window{}".format)
@pytest.mark.parametrize("layout", [StateLayout.RUNS, StateLayout.CHANNELS], ids=lambda layout: layout.value)
@pytest.mark.parametrize("name", ["nemotron-h-8b", "mamba2-2.7b", "falcon-h1-7b", "qwen3.5-397b-a17b", "kimi-linear-48b-a3b", "kimi-k3"])
def test_calls_of_layers_pose_their_problems(name, layout, length):
    """Calls as models make them: views of one projection, a norm where the model has one."""
    model = find_model(name).divided(8 if name == "nemotron-h-8b" else 1)
    batch, channels, H = 2, model.layer_channels, model.nheads
    rows, elements, groups = model.shape
    inner = H * rows

    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=BF16)

    taps = bf16(3, channels, length) if layout is StateLayout.RUNS else bf16(3, length, channels).transpose(1, 2)
    shared = (taps, torch.zeros(3, H, rows, elements), torch.zeros(3, groups, dtype=torch.int32), bf16(channels, 4))
    slots = torch.arange(batch, dtype=torch.int32)
    if model.kind == "mamba2":
        z, xBC, dt = bf16(batch, inner + channels + H).split([inner, channels, H], 1)
        norm = {} if model.gate else {"norm_weight": bf16(inner), "norm_group_size": model.norm_shape[1]}
        call = ssmgen.mamba2_layer.build(xBC, dt, z, *shared, bf16(channels), torch.zeros(H), bf16(H), bf16(H), **norm, state_indices=slots)
    elif model.kind == "kda":
        weights = (None, torch.zeros(H), torch.zeros(H * elements), bf16(rows))
        bound = -5.0 if model.gate is Gate.BOUNDED else None
        heads = (bf16(batch, H * elements), bf16(batch, H), bf16(batch, inner))
        call = ssmgen.kda_layer.build(bf16(batch, channels), *heads, *shared, *weights, lower_bound=bound, norm_activation="sigmoid",
                                      state_indices=slots)  # fmt: skip
    else:
        heads, weights = (bf16(batch, H), bf16(batch, H), bf16(batch, inner)), (None, torch.zeros(H), bf16(H), bf16(rows))
        call = ssmgen.gdn_layer.build(bf16(batch, channels), *heads, *shared, *weights, state_indices=slots)
    expected = [p for p in model.layers(indices=(Index.I32,)) if (p.conv.layout, p.conv.len) == (layout, length)]
    assert expected == ([] if (layout, length) == (StateLayout.CHANNELS, 4) else [call.problem()[0]])


@pytest.mark.parametrize("name", ["nemotron-h-8b", "qwen3.5-397b-a17b", "kimi-k3"])
def test_layers_of_several_tokens(name):
    model = find_model(name)

    def layers(**call) -> set[tuple]:
        found = model.layers(indices=(Index.I32,), tokens=4, **call)
        assert not any(p.faults() for p in found) and {p.conv.tokens for p in found} == {4}
        return {(p.update.value, p.conv.layout.value, p.conv.len, p.conv.windows.value, bool(p.intermediates)) for p in found}

    windows = [("runs", 3), ("runs", 4), ("channels", 3)]
    rolling = {("each", layout, 6, "no", False) for layout in ("runs", "channels")}
    assert layers() == {("final", *window, "no", False) for window in windows} | rolling
    kept = layers(intermediates=True, update_state=False)
    assert kept == {("none", *window, "runs", True) for window in windows}
    assert {p.update.value for p in model.layers(indices=(Index.NONE,), tokens=2)} == {"final"}


@pytest.mark.parametrize("form", ["final", "verify", "accepted"])
@pytest.mark.parametrize("name", ["nemotron-h-8b", "mamba2-2.7b", "falcon-h1-7b", "qwen3.5-397b-a17b", "kimi-k3"])
def test_calls_of_several_tokens_pose_their_problems(name, form):
    model, tokens, batch = find_model(name).divided(1 if name in ("mamba2-2.7b", "falcon-h1-7b") else 4), 3, 2
    rows, elements, groups = model.shape
    channels, H, inner = model.layer_channels, model.nheads, model.nheads * rows

    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=BF16)

    length = 1 + tokens + 1 if form == "accepted" else 3
    shared = (bf16(9, channels, length), torch.zeros(9, H, rows, elements), torch.zeros(9, groups, dtype=torch.int32), bf16(channels, 4))
    more: dict = {"state_indices": torch.arange(batch, dtype=torch.int32)}
    if form == "verify":
        more |= {"intermediate_states": torch.zeros(batch, tokens, H, rows, elements), "update_state": False}
        more |= {"intermediate_conv_window": bf16(batch, tokens, channels, 3)}
    elif form == "accepted":
        slots = torch.arange(batch * tokens, dtype=torch.int32).view(batch, tokens)
        more |= {"num_accepted_tokens": torch.ones(batch, dtype=torch.int32), "state_indices": slots, "dst_state_indices": slots.clone()}
    if model.kind == "mamba2":
        z, xBC, dt = bf16(batch, tokens, inner + channels + H).split([inner, channels, H], 2)
        more |= {} if model.gate else {"norm_weight": bf16(inner), "norm_group_size": model.norm_shape[1]}
        call = ssmgen.mamba2_layer.build(xBC, dt, z, *shared, bf16(channels), torch.zeros(H), bf16(H), bf16(H), **more)
    else:
        function, width, bias = ssmgen.gdn_layer, H, bf16(H)
        if model.kind == "kda":
            function, width, bias, more = ssmgen.kda_layer, H * elements, torch.zeros(H, elements), more | {"lower_bound": -5.0}
        tokenwise = [bf16(batch, tokens, n) for n in (channels, width, H, inner)]
        call = function.build(*tokenwise, *shared, None, torch.zeros(H), bias, **more, norm_weight=bf16(rows))
    verify = {"intermediates": True, "update_state": False} if form == "verify" else {}
    found = model.layers((DType.F32,), (Index.I32,), tokens=tokens, **verify)
    wanted = {"final": "final", "verify": "none", "accepted": "each"}[form]
    expected = [p for p in found if p.update.value == wanted and (p.conv.layout, p.conv.len) == (StateLayout.RUNS, length)]
    assert expected == [call.problem()[0]]
