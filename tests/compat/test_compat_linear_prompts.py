"""Drop-ins for prompts of linear attentions: they equal flash-linear-attention's on the same tokens one by one."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delta_oracles import BF16, F32, HK, HV, K, V, assert_refused, close, randn, starts_of
from engine_calls import no_call_goes_to_the_engine, pages, sglang_functions, vllm_functions  # noqa: F401
from fla_cases import CASES, V_FIRST, bag, both, call_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ssmgen.compat import fla, sglang, vllm
from ssmgen.compat.shared import replacing
from ssmgen.errors import ArgumentError, UnsupportedError

LENGTHS = (5, 0, 1, 3)

# Published parameters of flash-linear-attention 0.6.0, without annotations.
STATES = "scale=None, initial_state=None, output_final_state=False"
PACKED = "cu_seqlens=None, cu_seqlens_cpu=None"
LOW_RANK = f"{PACKED}, safe_gate=False, chunk_size=None, disable_recompute=False, cp_context=None, lower_bound=None"
SIGNATURES = {
    fla.chunk_kda: (
        f"q, k, v, g, beta, {STATES}, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
        "allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False, return_intermediate_states=False, "
        f"state_v_first=False, {PACKED}, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs"
    ),
    fla.chunk_gdn2: (
        f"q, k, v, g, b, w, {STATES}, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, {PACKED}, safe_gate=False, "
        "lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cp_context=None, **kwargs"
    ),
    fla.chunk_comba: f"q, k, v, p, g, beta=None, {STATES}, use_qk_l2norm_in_kernel=False, {PACKED}",
    fla.chunk_gla: f"q, k, v, g, {STATES}, state_v_first=False, {PACKED}",
    fla.chunk_dplr_delta_rule: f"q, k, v, a, b, gk, {STATES}, {LOW_RANK}, **kwargs",
    fla.chunk_rwkv7: f"r, w, k, v, a, b, {STATES.replace('None', '1.0', 1)}, {LOW_RANK}",
    fla.chunk_simple_gla: f"q, k, v, g=None, g_gamma=None, {STATES}, state_v_first=False, {PACKED}, **kwargs",
    fla.chunk_lightning_attn: f"q, k, v, layer_idx, num_layers, {STATES}, cu_seqlens=None, **kwargs",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_our_parameters_are_the_published_ones(function):
    made: dict = {}
    exec(f"def theirs({SIGNATURES[function]}): pass", made)
    assert replacing.differences(function, made["theirs"]) == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_fla_prompts_are_their_tokens_one_by_one(case, packed):
    """Final states are f32 and new, for initial states of every dtype, in the same layout."""
    narrow = "v=v_narrow" in CASES[case][1]
    heads, count = HK if narrow else HV, len(LENGTHS) if packed else 2
    before = randn(count, heads, K, V, seed=12, dtype=BF16 if packed else F32)
    kept, options = before.clone(), {"initial_state": before, "output_final_state": True}
    options |= {"cu_seqlens": starts_of(LENGTHS)} if packed else {}
    (o, last), (o2, last2) = both(case, options, *((1, sum(LENGTHS)) if packed else (2, 5)))
    assert o.dtype == BF16 and o.is_contiguous() and close(o, o2.double())
    rounded = 2**-8 if CASES[case][0] == "gdn2" else None  # the product of v and w is rounded before the kernels
    assert last.dtype == F32 and last.shape == before.shape and last.is_contiguous() and close(last, last2.double(), rounded)
    assert torch.equal(before, kept)


@pytest.mark.parametrize("name", V_FIRST)
def test_fla_states_may_be_turned(name):
    before = randn(2, HV, K, V, seed=12, dtype=F32)
    options = {"output_final_state": True}
    (o, last), _ = both(name, options | {"initial_state": before}, 2, 9)
    turned = {"state_v_first": True, "initial_state": before.transpose(2, 3)}
    (o2, last2), _ = both(name, options | turned, 2, 9)
    assert torch.equal(o, o2) and torch.equal(last, last2.transpose(2, 3))
    if name != "gla":  # which never had the old name
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            o3, _ = getattr(fla, f"chunk_{name}")(
                **call_of(name, True, 2, 9), initial_state=before.transpose(2, 3), transpose_state_layout=True
            )
        assert torch.equal(o, o3)


@pytest.mark.parametrize("case", ["kda", "dplr", "simple_gla"])
def test_fla_without_states(case):
    (o, last), (o2, _) = both(case, {}, 1, 7)
    assert last is None and close(o, o2.double())


@pytest.mark.parametrize("case", ["gla", "comba", "lightning_attn"])
def test_fla_rows_that_are_not_contiguous_are_copied(case):
    name, *_ = CASES[case]
    call = call_of(case, True, 1, 9)
    rows = {n: t for n, t in call.items() if isinstance(t, Tensor) and t.dim() == 4}
    strided = call | {n: t.transpose(-1, -2).contiguous().transpose(-1, -2) for n, t in rows.items()}
    assert strided["k"].stride(-1) != 1
    function = getattr(fla, f"chunk_{name}")
    assert torch.equal(function(**call)[0], function(**strided)[0])


def test_fla_f32_prompts_of_attention_with_a_decay_per_head():
    call = {n: t.float() for n, t in call_of("simple_gla", True, 1, 7).items()}
    o, _ = fla.chunk_simple_gla(**call, chunk_size=128)
    assert o.dtype == F32 and close(o, fla.fused_recurrent_simple_gla(**call)[0].double())


# Refused calls: the error's words.

X = {case: call_of(case, True, 1, 4) for case in CASES}
BEFORE = randn(1, HV, V, K, seed=12, dtype=F32)


@pytest.mark.parametrize(
    ("function", "call", "kind", "words"),
    [
        (fla.chunk_kda, X["kda"] | {"cp_context": object()}, NotImplementedError, "cp_context"),
        (fla.chunk_kda, X["kda"] | {"return_intermediate_states": True}, NotImplementedError, "return_intermediate_states"),
        (fla.chunk_kda, X["kda"] | {"head_first": True}, NotImplementedError, "head_first"),
        (fla.chunk_kda, X["kda"] | {"chunk_size": 16}, ArgumentError, "chunk_size is 16; expected 32 or 64"),
        (fla.chunk_kda, X["kda"] | {"use_gate_in_kernel": True}, ArgumentError, "A_log is None"),
        (fla.chunk_kda, X["kda-raw"] | {"safe_gate": True}, ArgumentError, "lower_bound is None with safe_gate=True and "
            "use_gate_in_kernel=True"),
        (fla.chunk_kda, X["kda"] | {"allow_neg_eigval": True}, ArgumentError, "allow_neg_eigval is True and use_beta_sigmoid_in_kernel "
            "False; expected both"),
        (fla.chunk_kda, X["kda"] | {"g": bag(1, 4)["g"]}, ArgumentError, r"g is \[1, 4, 4\]; expected \[B, T, HV, K\]"),
        (fla.chunk_kda, X["kda"] | {"initial_state": BEFORE}, ArgumentError, r"\[1, 4, 16, 32\]"),
        (fla.chunk_kda, X["kda"] | {"v": bag(1, 4)["v"].requires_grad_()}, ArgumentError, "v requires grad"),
        (fla.chunk_gdn2, X["gdn2"] | {"chunk_size": 32}, ArgumentError, "chunk_size is 32; expected 64"),
        (fla.chunk_comba, X["comba"] | {"output_final_state": BEFORE}, ArgumentError, "output_final_state is a Tensor"),
        (fla.chunk_dplr_delta_rule, X["dplr"] | {"lower_bound": 5.0}, ArgumentError, "lower_bound is 5.0"),
        (fla.chunk_dplr_delta_rule, X["dplr"] | {"head_first": False}, NotImplementedError, "head_first"),
        (fla.chunk_rwkv7, X["rwkv7"] | {"chunk_size": 24}, ArgumentError, "chunk_size is 24; expected a power of 2"),
        (fla.chunk_rwkv7, X["rwkv7"] | {"cp_context": object()}, NotImplementedError, "cp_context"),
        (fla.chunk_simple_gla, X["simple_gla"] | {"g_gamma": bag(1, 4)["gamma"]}, NotImplementedError, "g and g_gamma are both given"),
        (fla.chunk_simple_gla, X["simple_gla"] | {"initial_state": BEFORE}, ArgumentError, r"expected \[N, HV, K, V\] = "),
        (fla.chunk_lightning_attn, X["lightning_attn"] | {"layer_idx": 4}, ArgumentError, "layer_idx is 4"),
        (fla.chunk_lightning_attn, X["lightning_attn"] | {"head_first": True}, NotImplementedError, "head_first"),
    ],
)  # fmt: skip
def test_what_fla_is_refused(function, call, kind, words):
    assert_refused(function, call, kind, words)


# The engines, by the names that their layers hold. States are [·, HV, V, K].

SLOTS = torch.tensor([5, 1, 3, 7], dtype=torch.int32)
KIMI, GLM = "vllm.models.kimi_k3.nvidia.kda", "vllm.models.glm5next.common.kda"


def kda_call(case: str, **more: Any) -> dict[str, Any]:
    """fla's keywords, of packed sequences."""
    return call_of(case, True, 1, sum(LENGTHS)) | {"cu_seqlens": starts_of(LENGTHS), "use_qk_l2norm_in_kernel": True} | more


def one_by_one(call: dict[str, Any], before: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs, last states) in float64."""
    o, last = fla.fused_recurrent_kda(**call, initial_state=before, output_final_state=True, state_v_first=True)
    return o.double(), last.double()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_vllm_s_bailing_layers(vllm, dtype):
    layer, before = import_module("vllm.model_executor.models.bailing_moe_v3"), randn(4, HV, V, K, seed=12, dtype=dtype)
    call = kda_call("kda")
    o, last = layer.chunk_kda(**call, initial_state=before, output_final_state=True, safe_gate=True, lower_bound=-5.0)  # not looked at
    y, S = one_by_one(call, before)
    assert close(o, y) and last.dtype == F32 and close(last, S)
    assert layer.chunk_kda(**call, initial_state=before)[1] is None


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("buffer", [False, True])
def test_vllm_s_kimi_layers(vllm, bounded, buffer):
    """Raw gates and logits of beta; the output may go to where the layer wants it."""
    call, before = kda_call("kda-raw", lower_bound=-5.0 if bounded else None), randn(4, HV, V, K, seed=12, dtype=F32)
    y, S = one_by_one(call, before)
    theirs = {n: call[n] for n in ("q", "k", "v", "lower_bound", "cu_seqlens", "use_qk_l2norm_in_kernel")}
    theirs |= {"raw_g": call["g"], "raw_beta": call["beta"], "A_log": call["A_log"][None, None, :, None], "g_bias": call["dt_bias"]}
    out = torch.full((1, sum(LENGTHS) + 2, HV, V), torch.nan, dtype=BF16)[:, 1:-1] if buffer else None
    o, last = import_module(KIMI).prefill(**theirs, initial_state=before, output_final_state=True, out=out)
    assert (o is out or not buffer) and close(o, y) and close(last, S)


@pytest.mark.parametrize("safe", [False, True])
def test_vllm_s_glm_layers(vllm, safe):
    """beta is not a logit in these layers, and the bound only counts if the gate is safe."""
    raw = {"use_gate_in_kernel": True, "lower_bound": -5.0 if safe else None}
    call, before = kda_call("kda-gate-given", **raw) | {"g": bag(1, sum(LENGTHS))["raw"]}, randn(4, HV, V, K, seed=12, dtype=F32)
    y, S = one_by_one(call, before)
    theirs = {n: call[n] for n in ("q", "k", "v", "beta", "A_log", "cu_seqlens", "use_qk_l2norm_in_kernel")}
    theirs |= {"raw_g": call["g"], "g_bias": call["dt_bias"].unflatten(0, (HV, K)), "safe_gate": safe, "lower_bound": -5.0}
    o, last = import_module(GLM).chunk_kda_with_fused_gate(**theirs, initial_state=before, output_final_state=True)
    assert close(o, y) and close(last, S)


def sglang_call(case: str, pool: Tensor, **more: Any) -> dict[str, Any]:
    """fla's keywords as SGLang's backend passes them; of a raw gate all that it needs."""
    call = kda_call(case)
    raw = {"A_log", "dt_bias"} if call.get("use_gate_in_kernel") else set()
    theirs = {
        n: t for n, t in call.items() if n in raw | {"q", "k", "v", "g", "beta", "cu_seqlens", "lower_bound", "use_qk_l2norm_in_kernel"}
    }
    theirs |= {"beta_is_raw": bool(call.get("use_beta_sigmoid_in_kernel")), "initial_state": pool, "initial_state_indices": SLOTS}
    return theirs | more


@pytest.mark.parametrize("case", ["kda", "kda-raw", "kda-bounded"])
def test_sglang_layers(sglang, case):
    """The pool is updated in place, and its other slots are not touched. A slot outside the pool is padding."""
    pool, slots = pages(9, HV, V, K), SLOTS.clone()
    slots[3], kept = -1, pool.clone()
    y, S = one_by_one(kda_call(case) | {"scale": None}, pool[SLOTS.long()])
    backend = import_module("sglang.srt.layers.attention.linear.kernels.kda_triton")
    o = backend.chunk_kda(**sglang_call(case, pool, initial_state_indices=slots))
    written = sum(LENGTHS[:3])
    assert close(o[:, :written], y[:, :written]) and not o[:, written:].any()
    for i in (0, 2):
        assert close(pool[SLOTS[i]], S[i])
        pool[SLOTS[i]] = kept[SLOTS[i]]
    assert torch.equal(pool, kept)


LONG = (66, 0, 1, 64)


def states_after(case: str, pool: Tensor, sequence: int, tokens: int) -> Tensor:
    """The state of a long sequence's slot after the first `tokens` tokens."""
    start = sum(LONG[:sequence])
    call = {n: t[:, start : start + tokens] if isinstance(t, Tensor) and t.dim() > 2 else t for n, t in long_call(case).items()}
    return one_by_one(call, pool[SLOTS[sequence], None])[1][0] if tokens else pool[SLOTS[sequence]].double()


def long_call(case: str) -> dict[str, Any]:
    return call_of(case, True, 1, sum(LONG)) | {"use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("tracked", [False, True])
def test_sglang_states_of_chunks(sglang, tracked):
    """SGLang's prefix caches find the states in their places: before every chunk, or only the tracked ones."""
    pool = pages(9, HV, V, K)
    kept, wanted, after = pool.clone(), torch.tensor([1, -1, 0, 1], dtype=torch.int32), torch.full((4, HV, V, K), torch.nan)
    call = sglang_call("kda", pool) | {n: long_call("kda")[n] for n in ("q", "k", "v", "g", "beta")} | {"cu_seqlens": starts_of(LONG)}
    more = {"track_state": after, "track_chunk_idx": wanted} if tracked else {}
    _, h = sglang.chunk_kda(**call, output_intermediate_states=True, **more)
    if tracked:
        assert h is None and all(close(after[i], states_after("kda", kept, i, 64 * n)) for i, n in enumerate(wanted.tolist()) if n >= 0)
        return
    chunks = [(i, c * 64) for i, length in enumerate(LONG) for c in range(-(-length // 64))]
    assert h.shape[0] == 1 and all(close(h[0, row], states_after("kda", kept, *place)) for row, place in enumerate(chunks))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_lightning_prompts_and_their_next_token(engine, request):
    """The calls of MiniMax's and Bailing's layers: rows of heads, and a state of a page, which the second call updates in its slot."""
    held, call = request.getfixturevalue(engine), call_of("lightning_attn", True, 2, 7)
    q, k, v = (call[n].transpose(1, 2).contiguous() for n in "qkv")
    slope, pool = torch.tensor([0.3, 0.01]).view(HK, 1, 1), pages(4, HK, K, V)
    slots = torch.tensor([2, -1])
    before = pool[:2].clone()
    gamma = {"g_gamma": -slope.flatten(), "scale": 1.0, "initial_state": before, "output_final_state": True}
    y, S = fla.fused_recurrent_simple_gla(*(call[n][:, :-1] for n in "qkv"), **gamma)
    o, history = held.lightning_attention(*(t[:, :, :-1] for t in (q, k, v)), slope, 256, kv_history=before)
    assert o.shape == (2, HK, 6, V) and close(o.transpose(1, 2), y.double())
    assert history.dtype == F32 and close(history[:, :, -1], S.double())
    fresh, _ = held.lightning_attention(q, k, v, slope.flatten())
    y, _ = fla.fused_recurrent_simple_gla(*(call[n] for n in "qkv"), **gamma | {"initial_state": None})
    assert close(fresh.transpose(1, 2), y.double())
    pool[2] = history[0, :, -1]
    kept = pool.clone()
    step = held.linear_decode_forward_triton(*(t[:, :, -1:] for t in (q, k, v)), pool, slope, slots, 32)
    y, S = fla.fused_recurrent_simple_gla(*(call[n][:, -1:] for n in "qkv"), **gamma | {"initial_state": history[:, :, -1]})
    assert close(step[0], y[0].flatten().double()) and not step[1].any() and close(pool[2], S[0].double())
    pool[2] = kept[2]
    assert torch.equal(pool, kept)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("padded", [False, True])
def test_sglang_segments_and_their_next_tokens(sglang, padded, dtype):
    """Prompts and steps of a pool's slots; a fresh sequence does not read its own, and one of no slot writes none."""
    call, pool = call_of("lightning_attn", True, 1, sum(LENGTHS)), pages(9, HK, K, V, dtype=dtype)
    q, k, v = (call[n][0] for n in "qkv")
    slope, slots, kept = torch.tensor([0.3, 0.01]).view(HK, 1, 1), SLOTS.clone(), pool.clone()
    slots[0] = -1 if padded else slots[0]
    read = torch.tensor([True, True, False, True])
    meta = SimpleNamespace(batch_size=4, q_offsets=starts_of(LENGTHS), s_offsets=slots, s_scales=read, mask=None)
    backend = import_module("sglang.srt.layers.attention.linear.lightning_backend")
    o = backend.seg_la_fwd(q, k, v, pool, slope, meta, softmax_scale=0.5)
    gamma = {"g_gamma": -slope.flatten(), "scale": 0.5, "output_final_state": True}
    before = kept[SLOTS.long()] * read[:, None, None, None]
    y, S = fla.fused_recurrent_simple_gla(*(call[n] for n in "qkv"), **gamma, initial_state=before, cu_seqlens=starts_of(LENGTHS))
    first = LENGTHS[0] if padded else 0
    assert close(o[first:], y[0, first:].double())
    written = SLOTS[int(padded) :].long()
    assert close(pool[written], S[int(padded) :].double())
    now, meta.batch_size = pool.clone(), 4
    step = backend.seg_la_fwd(q[:4], k[:4], v[:4], pool, slope, meta, softmax_scale=0.5)
    rows = [t[:4].unsqueeze(1) for t in (q, k, v)]
    y, S = fla.fused_recurrent_simple_gla(*rows, **gamma, initial_state=now[SLOTS.long()])
    assert close(step[int(padded) :], y[int(padded) :, 0].double()) and close(pool[written], S[int(padded) :].double())
    pool[written] = kept[written]
    assert torch.equal(pool, kept)


POOL = randn(9, HV, V, K, seed=12, dtype=F32)
SEGMENTS = {n: call_of("lightning_attn", True, 1, 9)[n][0] for n in "qkv"} | {
    "s": POOL[:, :HK].transpose(2, 3),
    "decay_scales": POOL[0, 0, :HK, 0],
}
META = SimpleNamespace(batch_size=4, q_offsets=starts_of(LENGTHS), s_offsets=SLOTS, s_scales=SLOTS)
KEPT = {"initial_state": randn(4, HV, K, V, seed=12, dtype=BF16), "output_final_state": True}
ATTENTION = {n: t.transpose(1, 2) for n, t in call_of("lightning_attn", True, 2, 7).items() if n in "qkv"}
WAYS = {
    "fla": (fla.chunk_kda, kda_call("kda-raw") | KEPT),
    "fla's attention": (fla.chunk_simple_gla, call_of("simple_gla", True, 1, 9) | KEPT | {"cu_seqlens": starts_of(LENGTHS)}),
    "vllm": (vllm.chunk_kda, kda_call("kda") | {"initial_state": POOL[:4], "output_final_state": True}),
    "sglang": (sglang.chunk_kda, sglang_call("kda-raw", POOL, output_intermediate_states=True)),
    "sglang's tracked": (sglang.chunk_kda, sglang_call("kda", POOL, track_state=POOL[:4], track_chunk_idx=SLOTS)),
    "lightning": (sglang.lightning_attention, ATTENTION | {"ed": torch.rand(HK, 1, 1), "kv_history": POOL[:2, :HK].transpose(2, 3)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_tensor_is_read_by_the_host(way):
    """A fake tensor holds no values: a read of a value is an error."""
    function, call = WAYS[way]
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        function(**{n: mode.from_tensor(t) if isinstance(t, Tensor) else t for n, t in call.items()})


@pytest.mark.parametrize(
    ("function", "call", "kind", "words"),
    [
        (vllm.chunk_kda, X["kda"] | {"initial_state": POOL[:2]}, ArgumentError, r"initial_states is"),
        (vllm.chunk_kda, X["kda"] | {"g": bag(1, 4)["g"]}, ArgumentError, r"g is \[1, 4, 4\]; expected \[B, T, HV, K\]"),
        (sglang.chunk_kda, X["kda"], UnsupportedError, "initial_state is None"),
        (sglang.chunk_kda, X["kda"] | {"initial_state": POOL, "initial_state_indices": SLOTS.short()}, ArgumentError, "is int16"),
        (sglang.chunk_kda, sglang_call("kda", POOL, track_state=POOL[:4]), ArgumentError, "is None; expected both or neither"),
        (
            sglang.chunk_kda,
            sglang_call("kda", POOL, track_state=POOL[:4], track_chunk_idx=SLOTS, cu_seqlens=None), ArgumentError, "without cu_seqlens",
        ),
        (vllm.lightning_attention, {n: X["kda"][n] for n in "qkv"} | {"ed": POOL[0, 0]}, ArgumentError, "slope"),
        (
            sglang.seg_la_fwd,
            SEGMENTS | {"meta": META, "track_lens": SLOTS[:3], "track_state_indices": SLOTS}, ArgumentError, r"track_lens is \[3\]",
        ),
        (sglang.seg_la_fwd, SEGMENTS | {"meta": META, "caches": POOL}, ArgumentError, "cache_indices is None; expected a tensor"),
        (
            sglang.seg_la_fwd,
            SEGMENTS | {"meta": SimpleNamespace(**vars(META) | {"q_offsets": SLOTS})}, ArgumentError, r"meta.q_offsets is \[4\]",
        ),
        (
            vllm.linear_decode_forward_triton,
            ATTENTION | {"kv_caches": POOL.transpose(2, 3), "slope_rate": POOL[0, 0, 0, :HK], "slot_idx": SLOTS[:2]},
            ArgumentError, r"q is \[2, 2, 7, 32\]; expected one token",
        ),
    ],
)  # fmt: skip
def test_what_the_engines_are_refused(function, call, kind, words):
    assert_refused(function, call, kind, words)
