"""Prompts that the engines give to other backends by default, and prompts with states inside them, in float64."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delta_oracles import BF16, CHUNK, F32, HK, HV, LENGTHS, SLOTS, TOKENS, K, V, close, operands, randn, starts_of, states, walks
from engine_calls import no_call_goes_to_the_engine, pages, sglang_functions, vllm_functions  # noqa: F401
from fla_cases import bag
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import sigmoid

from ssmgen.compat import fla, sglang, vllm
from ssmgen.compat.shared import replacing
from ssmgen.errors import ArgumentError, UnsupportedError

KIMI, GLM = "vllm.models.kimi_k3.nvidia.kda", "vllm.models.glm5next.common.kda"
BOUND = -5.0
OFFSETS = torch.tensor([CHUNK, 0, 0, 0], dtype=torch.int32)


def kda_operands() -> dict[str, Tensor]:
    """Raw gates per key channel and logits of beta, of packed prompts."""
    given = {n: operands(1, TOKENS)[n] for n in "qkv"}
    return given | {
        "g": randn(1, TOKENS, HV, K, seed=4), "beta": randn(1, TOKENS, HV, seed=5), "A_log": randn(HV, seed=6, dtype=F32) / 4,
        "dt_bias": randn(HV * K, seed=8, dtype=F32),
    }  # fmt: skip


def kda_walk(x: dict[str, Tensor], before: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(outputs [tokens, HV, V], the states of each prompt, before its first token and after each), in float64."""
    q, k, v, raw, beta = (x[n][0].double() for n in ("q", "k", "v", "g", "beta"))
    q, k = ((t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(HV // HK, 1) for t in (q, k))
    decay = (BOUND * sigmoid(x["A_log"].double().exp()[:, None] * (raw + x["dt_bias"].double().view(HV, K)))).exp()
    outputs, found = torch.empty(v.shape, dtype=torch.float64), []
    for i in range(len(LENGTHS)):
        each = [before[i].double()]
        for t in range(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])):
            S = each[-1] * decay[t, :, None]
            S = S + (sigmoid(beta[t])[:, None] * (v[t] - (S * k[t, :, None]).sum(-1)))[..., None] * k[t, :, None]
            outputs[t] = K**-0.5 * (S * q[t, :, None]).sum(-1)
            each.append(S)
        found.append(torch.stack(each))
    return outputs, found


# Kimi-K3 and GLM5-Next, whose default is FlashKDA.


@pytest.mark.parametrize("module", [KIMI, GLM])
def test_vllm_checkpoints_lie_at_multiples_of_64(vllm, module):
    alignment = import_module(module).kda_prefill_checkpoint_alignment
    assert [alignment(backend) for backend in ("flashkda", "triton", "flashinfer")] == [64, None, None]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_vllm_prompts_of_kimi_k3(vllm, checkpoints, dtype):
    """Results go to the layer's buffers, and the output is a part of one; A_log has four axes there."""
    layer, x, before = import_module(KIMI), kda_operands(), states(len(LENGTHS), dtype)
    layer.kda_prefill_checkpoint_alignment("flashkda")
    out = torch.full((1, TOKENS + 3, HV, V), torch.nan, dtype=BF16)[:, 1:-2]
    last, kept = (torch.full(before.shape, torch.nan, dtype=dtype) for _ in range(2))
    more = {"checkpoint_state": kept, "checkpoint_offsets": OFFSETS} if checkpoints else {}
    found = layer._flashkda_prefill(
        **x | {"A_log": x["A_log"][None, None, :, None]}, lower_bound=BOUND, initial_state=before, cu_seqlens=starts_of(LENGTHS), out=out,
        final_state=last, workspace=torch.empty(7, dtype=torch.uint8), **more,
    )  # fmt: skip
    y, each = kda_walk(x, before)
    assert found[0] is out and found[1] is last and close(out[0], y)
    assert all(close(last[i], S[-1]) for i, S in enumerate(each)) and (not checkpoints or close(kept[0], each[0][CHUNK]))


@pytest.mark.refused
def test_vllm_checkpoints_of_layers_that_were_made_before(vllm, monkeypatch, caplog):
    """Checkpoints may lie at multiples of 16, where ssmgen's kernels give no state."""
    layer = import_module(KIMI)
    monkeypatch.setattr(vllm_flashkda()._Places, "aligned", False)
    call = X | INTO | {"checkpoint_offsets": OFFSETS}
    assert layer._flashkda_prefill(**call) == f"the engine's {KIMI}._flashkda_prefill"
    assert "Call register before the engine is built" in caplog.text


def vllm_flashkda() -> Any:
    return import_module("ssmgen.compat.vllm.flashkda")


class Layer:
    """The parts of GLM5-Next's layer that the method reads; exported: the values that it passed on."""

    def __init__(self, x: dict[str, Tensor], dtype: torch.dtype):
        shape, self.exported = (len(LENGTHS) + 2, HV, V, K), {}
        self.A_log, self.dt_bias, self.kda_lower_bound = x["A_log"].view(1, 1, HV, 1), x["dt_bias"].view(HV, K), BOUND
        self._flashkda_buffer_specs = ((shape, dtype), (shape, dtype), ((9,), torch.uint8), ((1, TOKENS + 5, HV, V), BF16))
        self._checkpoint_exporter = SimpleNamespace(export=lambda checkpoint, **more: self.exported.update(more, checkpoint=checkpoint))


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_vllm_prompts_of_glm(vllm, given, checkpoints):
    """Results lie in the engine's workspaces, the output unless there is one; the layer's exporter gets states of checkpoints."""
    x, before = kda_operands(), states(len(LENGTHS))
    layer, method = Layer(x, F32), import_module(GLM).Glm5NextLinearAttention._flashkda_prefill
    out = torch.full((1, TOKENS, HV, V), torch.nan, dtype=BF16) if given else None
    checkpoint = SimpleNamespace(checkpoint_offsets=OFFSETS, offsets=OFFSETS.tolist()) if checkpoints else None
    starts, others = starts_of(LENGTHS), {n: randn(1, seed=i) for i, n in enumerate(("raw_qkv", "conv_state", "recurrent_state"))}
    call = {n: x[n] for n in ("q", "k", "v", "g", "beta")} | {"initial_state": before, "cu_seqlens": starts, "out": out}
    found, last = method(layer, **call, checkpoint=checkpoint, **others)
    y, each = kda_walk(x, before)
    assert (found is out or not given) and close(found[0], y) and all(close(last[i], S[-1]) for i, S in enumerate(each))
    if checkpoints:
        assert close(layer.exported.pop("recurrent_checkpoint")[0], each[0][CHUNK])
        assert layer.exported == {"checkpoint": checkpoint, "cu_seqlens": starts} | others
    assert checkpoints or not layer.exported


@pytest.mark.refused
@pytest.mark.parametrize("offsets", [[16, 0, 0, 0], None])
def test_vllm_checkpoints_of_glm_at_other_places(vllm, offsets, caplog):
    method, checkpoint = import_module(GLM).Glm5NextLinearAttention._flashkda_prefill, SimpleNamespace(offsets=offsets)
    call = {n: X[n] for n in ("q", "k", "v", "g", "beta")} | {n: INTO[n] for n in ("initial_state", "cu_seqlens", "out")}
    assert method(None, **call, checkpoint=checkpoint) == f"the engine's {GLM}.Glm5NextLinearAttention._flashkda_prefill"
    assert "not all multiples of 64" in caplog.text


# SGLang's gated delta rules, whose default is FlashInfer.


def test_sglang_leaves_prompts_to_the_backend_that_ssmgen_serves(sglang, monkeypatch):
    backend = import_module("sglang.srt.layers.attention.linear.gdn_backend")
    assert backend.flashinfer_gdn_prefill_default(object()) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert backend.flashinfer_gdn_prefill_default(object()) is None


@pytest.mark.refused
@pytest.mark.parametrize("why", ["another card", "another method"])
def test_sglang_keeps_its_default(sglang, monkeypatch, caplog, why):
    """The default stays if FlashInfer has not been compared, and if the method to be called is SGLang's own."""
    from ssmgen.compat import sglang as plugin

    backend = import_module("sglang.srt.layers.attention.linear.gdn_backend")
    if why == "another card":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    else:
        monkeypatch.setitem(plugin._ENGINE.outcome, "sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel.extend", "kept")
    assert backend.flashinfer_gdn_prefill_default(object()).startswith("the engine's")
    assert ("sm_100" if why == "another card" else "TritonGDNKernel.extend is sglang's own") in caplog.text


# Jet-Nemotron


def jet_call(pool: Tensor, *lead: int, **more: Any) -> dict[str, Any]:
    return operands(*lead) | {"initial_state_source": pool, "initial_state_indices": SLOTS, "use_qk_l2norm_in_kernel": True} | more


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sglang_prompts_of_jet_nemotron(sglang, dtype, frozen, monkeypatch):
    """By chunks: no token waits for the token before it."""
    pool, updates = pages(9, HV, V, K, dtype=dtype), import_module("ssmgen.compat.sglang.updates")
    kept, before = pool.clone(), pool[SLOTS.long()]
    monkeypatch.setattr(updates, "gated_delta_rule", None)
    call = jet_call(pool, 1, TOKENS, cu_seqlens=starts_of(LENGTHS), disable_state_update=frozen)
    o = import_module("sglang.srt.models.jet_nemotron").fused_recurrent_gated_delta_rule_update(**call)
    y, each = walks(call, LENGTHS, before, norm=True)
    assert o.shape == (1, TOKENS, HV, V) and o.dtype == BF16 and close(o[0], y)
    for i, slot in enumerate(SLOTS.tolist()):
        if not frozen and LENGTHS[i]:
            assert close(pool[slot], each[i][-1])
            pool[slot] = kept[slot]
    assert torch.equal(pool, kept), "another slot was written"


@pytest.mark.parametrize("packed", [False, True])
def test_sglang_steps_of_jet_nemotron(sglang, packed):
    """One token a sequence; a negative slot is padding, and beta may be missing."""
    pool, slots = pages(9, HV, V, K), torch.tensor([5, -1, 3], dtype=torch.int32)
    kept, lead = pool.clone(), (1, 3) if packed else (3, 1)
    call = jet_call(pool, *lead, initial_state_indices=slots, beta=None, cu_seqlens=starts_of([1] * 3) if packed else None)
    o = sglang.fused_recurrent_gated_delta_rule_update(**call)
    y, each = walks(call, [1] * 3, kept[[5, 8, 3]], norm=True)
    rows = o.flatten(0, 1)
    assert o.shape == (*lead, HV, V) and close(rows[[0, 2]], y[[0, 2]]) and not rows[1].any()
    for i, slot in ((0, 5), (2, 3)):
        assert close(pool[slot], each[i][-1])
        pool[slot] = kept[slot]
    assert torch.equal(pool, kept)


def test_sglang_drafts_of_jet_nemotron(sglang):
    """States after each token go to rows of a buffer; the pool is only read."""
    pool, buffer, T = pages(9, HV, V, K), torch.zeros(6, 3, HV, V, K), 3
    kept, call = pool.clone(), jet_call(pool, 2, T, initial_state_indices=SLOTS[:2], disable_state_update=True)
    rows = {"intermediate_states_buffer": buffer, "intermediate_state_indices": torch.tensor([4, 0]), "cache_steps": T}
    o = sglang.fused_recurrent_gated_delta_rule_update(**call, **rows)
    y, each = walks(call, [T] * 2, kept[SLOTS[:2].long()], norm=True)
    assert close(o.flatten(0, 1), y) and torch.equal(pool, kept)
    assert all(close(buffer[row], each[i][1:]) for i, row in enumerate((4, 0)))


# Lightning attention's states inside a prompt


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sglang_tracks_states_of_segments(sglang, dtype):
    """Tracks the state after a number of tokens of a prompt, in a separate slot. A prompt without a slot, without tokens or with fewer has
    none."""
    tokens, pool = bag(1, TOKENS), pages(12, HK, K, V, dtype=dtype)
    q, k, v = (tokens[n][0] for n in ("q", "k", "v_narrow"))
    kept, slope, slots = pool.clone(), torch.tensor([0.3, 0.01]).view(HK, 1, 1), SLOTS.clone()
    slots[2] = -1
    lens, places = torch.tensor([CHUNK, 0, 1, 65], dtype=torch.int32), torch.tensor([8, 9, 10, 11])
    read = torch.tensor([True, True, True, False])
    meta = SimpleNamespace(batch_size=4, q_offsets=starts_of(LENGTHS), s_offsets=slots, s_scales=read, mask=None)
    backend = import_module("sglang.srt.layers.attention.linear.lightning_backend")
    call = {"s": pool, "decay_scales": slope, "meta": meta, "softmax_scale": 0.5}
    o = backend.seg_la_fwd(q, k, v, **call, track_lens=lens, track_state_indices=places)
    written, gamma = pool.clone(), {"g_gamma": -slope.flatten(), "scale": 0.5, "output_final_state": True}
    for at, length, slot in ((CHUNK, CHUNK, 8), (LENGTHS[0], LENGTHS[0], 5)):
        rows = (t[None, :at] for t in (q, k, v))
        y, S = fla.fused_recurrent_simple_gla(*rows, **gamma, initial_state=kept[5, None])
        assert close(o[:length], y[0].double()) and close(pool[slot], S[0].double())
    pool.copy_(kept)
    assert torch.equal(backend.seg_la_fwd(q, k, v, **call), o), "tracking changes a bit of the output"
    pool[8] = written[8]
    assert torch.equal(pool, written), "another slot was written"


def lightning_drafts() -> dict[str, Any]:
    """A verification of three drafts each, by name. The second sequence is padding, and the first one's states go to the last row."""
    q, k, v = (randn(9, HK, width, seed=seed, dtype=F32) for seed, width in enumerate((K, K, V)))
    meta = SimpleNamespace(batch_size=3, q_offsets=starts_of([3] * 3), s_offsets=torch.tensor([5, -1, 2]), s_scales=None, mask=None)
    made = {
        "q": q,
        "k": k,
        "v": v,
        "s": randn(7, HK, K, V, seed=3, dtype=F32),
        "decay_scales": torch.tensor([0.3, 0.01]).view(HK, 1, 1),
        "meta": meta,
    }
    return made | {"caches": torch.full((4, 4, HK, K, V), torch.nan), "cache_indices": torch.tensor([3, 1, 0]), "softmax_scale": 0.5}


def test_sglang_verifies_drafts_of_lightning_attention(sglang):
    """The state after each token goes to its sequence's row of the buffer, and the pool is only read."""
    call = lightning_drafts()
    o, pool = sglang.seg_la_fwd(**call), lightning_drafts()["s"]
    gamma = {"g_gamma": -call["decay_scales"].flatten(), "scale": 0.5, "output_final_state": True}
    for sequence, slot, row in ((0, 5, 3), (2, 2, 0)):
        for t in range(3):
            rows = (call[n][None, 3 * sequence : 3 * sequence + t + 1] for n in "qkv")
            y, S = fla.fused_recurrent_simple_gla(*rows, **gamma, initial_state=pool[slot, None])
            assert torch.allclose(o[3 * sequence + t], y[0, t], rtol=1e-4, atol=1e-4)
            assert torch.allclose(call["caches"][row, t], S[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(call["s"], pool) and not o[3:6].any()
    assert call["caches"][[1, 2]].isnan().all() and call["caches"][:, 3].isnan().all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"cache_indices": None}, ArgumentError, "cache_indices is None; expected a tensor"),
        ({n: torch.zeros(8, HK, K) for n in "qkv"}, ArgumentError, "q has 8 tokens for 3 sequences with caches; expected a multiple"),
        ({"cache_indices": None, **{n: torch.zeros(8, HK, K) for n in "qkv"}}, ArgumentError, r"(?s)cache_indices is None.*a multiple"),
        ({"meta": SimpleNamespace(mask=torch.zeros(1))}, UnsupportedError, "meta.mask is given; expected None"),
    ],
)
def test_drafts_of_lightning_attention_that_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        sglang.seg_la_fwd(**lightning_drafts() | change)


POOL = randn(9, HV, V, K, seed=12, dtype=F32)
X = kda_operands()
INTO = {"initial_state": states(4), "cu_seqlens": starts_of(LENGTHS), "lower_bound": BOUND, "workspace": torch.empty(1)}
INTO |= {"out": torch.empty(1, TOKENS, HV, V, dtype=BF16), "final_state": states(4), "checkpoint_state": states(4)}
WAYS = {
    "vllm": (vllm.flashkda_prefill, X | INTO | {"checkpoint_offsets": OFFSETS}),
    "jet": (sglang.fused_recurrent_gated_delta_rule_update, jet_call(POOL, 1, TOKENS, cu_seqlens=starts_of(LENGTHS))),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_tensor_is_read_by_the_host(way, monkeypatch):
    """A fake tensor holds no values: a read of a value is an error."""
    function, call = WAYS[way]
    monkeypatch.setattr(vllm_flashkda()._Places, "aligned", True)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        function(**{n: mode.from_tensor(t) if isinstance(t, Tensor) else t for n, t in call.items()})


def test_what_a_replacement_needs():
    """Its own place comes from the recorded ones, so that a misspelt one is found."""
    for engine in (sglang._ENGINE, vllm._ENGINE):
        places = {r.place for r in engine.replacements}
        assert all(set(r.needs) <= places for r in engine.replacements)
    assert replacing.REPLACED == "replaced"
