"""Prompts of gated delta rules as vLLM and SGLang call them, in float64; and laws of all such drop-ins."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import pytest
import torch
from delta_oracles import (
    BF16,
    CHUNK,
    F32,
    HV,
    LENGTHS,
    POOL,
    SLOTS,
    TOKENS,
    TRACKED,
    UNTOUCHED,
    V,
    assert_refused,
    checkpointed,
    chunks_of,
    close,
    extend_call,
    flashinfer_call,
    logs,
    operands,
    sglang_call,
    starts_of,
    states,
    vllm_call,
    walk,
    walks,
)
from emulated_calls import needs_emulator
from engine_calls import no_call_goes_to_the_engine, pages, sglang_functions, vllm_functions  # noqa: F401
from prompt_cases import Case, emulated
from torch._subclasses.fake_tensor import FakeTensorMode

from ssmgen.compat import fla, flashinfer, sglang, vllm
from ssmgen.compat.sglang import delta as sglang_delta
from ssmgen.compat.shared import delta_prompts
from ssmgen.errors import ArgumentError, UnsupportedError

# vLLM: by the names that its layers hold.


@pytest.mark.parametrize(("backend", "dtype"), [("forward_native", F32), ("forward_cuda", BF16)])
def test_vllm_layers(vllm, backend, dtype):
    """The class that the layers call has a method for each backend, and either comes here."""
    before = states(len(LENGTHS), dtype)
    call, layer = vllm_call(initial_state=before), import_module("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn")
    method = getattr(layer.ChunkGatedDeltaRule(), backend)
    o, last = method(**call)
    y, each = walks(call, LENGTHS, before)
    assert o.shape == (1, TOKENS, HV, V) and close(o[0], y)
    assert last.dtype == F32 and all(close(last[i], S[-1]) for i, S in enumerate(each))
    assert method(**call | {"output_final_state": False})[1] is None


def test_vllm_output_in_a_buffer(vllm):
    """It may be longer, as one for all tokens of a step is."""
    call, buffer = vllm_call(initial_state=states(4)), torch.full(((TOKENS + 3) * HV * V,), torch.nan, dtype=BF16)
    for core in (buffer, buffer.view(TOKENS + 3, HV, V)):
        buffer.fill_(torch.nan)
        o, _ = vllm.chunk_gated_delta_rule(**call, core_attn_out=core, chunk_indices=SLOTS, chunk_offsets=SLOTS)
        assert o.data_ptr() == buffer.data_ptr() and close(o[0], walks(call, LENGTHS, call["initial_state"])[0])
        assert buffer[TOKENS * HV * V :].isnan().all()


def test_vllm_checkpoints(vllm):
    call, more = vllm_call(initial_state=states(4, BF16), use_qk_l2norm_in_kernel=True), checkpointed()
    o, last = vllm.fi_chunk_gated_delta_rule(**call, **more)
    y, each = walks(call, LENGTHS, call["initial_state"], norm=True)
    places, rows = [(i, at + CHUNK) for i, at in chunks_of() if at + CHUNK <= LENGTHS[i]], more["state_checkpoints"]
    assert close(o[0], y) and all(close(rows[row], each[i][at]) for row, (i, at) in enumerate(places))
    assert len(rows) == len(places) + 1 and (rows[-1] == UNTOUCHED).all()
    assert all(close(last[i], S[-1]) for i, S in enumerate(each))


# SGLang


@pytest.mark.parametrize(("in_place", "dtype"), [(True, F32), (False, BF16)])
def test_sglang_layers(sglang, in_place, dtype):
    """SGLang's prefix caches find a state before each chunk in its place, also before a sequence's first chunk."""
    pool = pages(9, *POOL, dtype=dtype)
    kept, before = pool.clone(), pool[SLOTS.long()]
    call = sglang_call(initial_state=pool, inplace_update=in_place)
    o, none, h = sglang.chunk_gated_delta_rule(**call)
    y, each = walks(call, LENGTHS, before, norm=True)
    assert none is None and close(o[0], y) and h.shape[0] == 1 and h.dtype == dtype
    for row, (i, at) in enumerate(chunks_of()):
        assert close(h[0, row], each[i][at])
    for i, slot in enumerate(SLOTS.tolist()):
        if in_place and LENGTHS[i]:
            assert close(pool[slot], each[i][-1])
            pool[slot] = kept[slot]
    assert torch.equal(pool, kept), "another slot was written"


def test_sglang_rows_and_padding(sglang):
    """Without cu_seqlens each row is a sequence. A negative slot is padding, and there may be more slots than sequences."""
    pool, slots = pages(9, *POOL), torch.tensor([5, -1, 3, 8], dtype=torch.int32)
    kept, call = pool.clone(), operands(3, 66)
    o, _, h = sglang.chunk_gated_delta_rule(**call, initial_state=pool, initial_state_indices=slots)
    assert h.shape == (3, 2, *POOL) and not o[1].any()
    for b, slot in ((0, 5), (2, 3)):
        y, each = walk({n: t[b] for n, t in call.items()}, kept[slot])
        assert close(o[b], y) and close(pool[slot], each[-1]) and close(h[b, 0], each[0]) and close(h[b, 1], each[CHUNK])
        pool[slot] = kept[slot]
    assert torch.equal(pool, kept)


@pytest.mark.parametrize(("in_place", "dtype"), [(True, F32), (True, BF16), (False, F32)])
@pytest.mark.parametrize("tracked", [False, True])
def test_sglang_backend(sglang, tracked, in_place, dtype):
    """The method of its Triton kernels returns no states before chunks, except tracked ones, also before a sequence's first chunk."""
    pool = pages(9, *POOL, dtype=dtype)
    kept, before = pool.clone(), pool[SLOTS.long()]
    buffer = torch.full((len(LENGTHS), *POOL), torch.nan) if tracked else None
    kernel = import_module("sglang.srt.layers.attention.linear.kernels.gdn_triton").TritonGDNKernel()
    assert kernel.supports_track_state_snapshot
    more = {"track_state": buffer, "track_chunk_idx": TRACKED if tracked else None}
    o, *none = kernel.extend(**extend_call(pool, inplace_update=in_place, **more))
    y, each = walks(sglang_call(), LENGTHS, before, norm=True)
    assert none == [None, None] and close(o[0], y)
    for i, slot in enumerate(SLOTS.tolist()):
        if in_place and LENGTHS[i]:
            assert close(pool[slot], each[i][-1])
            pool[slot] = kept[slot]
        if tracked and TRACKED[i] >= 0:
            want = each[i][TRACKED[i] * CHUNK]
            assert close(buffer[i].to(dtype), want)
    assert torch.equal(pool, kept), "another slot was written"


def test_sglang_s_own_method_gives_tracked_states():
    """If ssmgen refuses a call, the tracked states come from the engine's method, which returns the states before all chunks."""
    rows = chunks_of()
    states_of_all = torch.stack([torch.full(POOL, 10.0 * i + at) for i, at in rows])[None]
    seen = []

    def theirs(self, *args, query_start_loc, **kwargs):
        seen.append(kwargs)
        return "o", None, states_of_all.bfloat16()

    buffer, method = torch.zeros(len(LENGTHS), *POOL), sglang_delta.with_tracked_states(theirs)
    found = method(None, query_start_loc=starts_of(LENGTHS), track_state=buffer, track_chunk_idx=TRACKED, layer_id=1)
    assert found[0] == "o" and seen == [{"layer_id": 1}]
    for i, chunk in enumerate(TRACKED.tolist()):
        assert chunk < 0 or (buffer[i] == torch.tensor(10.0 * i + CHUNK * chunk).bfloat16()).all()
    assert method(None, query_start_loc=starts_of(LENGTHS))[0] == "o"


# All of them


def test_rows_that_are_not_contiguous_are_copied():
    call = vllm_call(initial_state=states(4).transpose(2, 3).contiguous().transpose(2, 3))
    strided = call | {n: call[n].transpose(-1, -2).contiguous().transpose(-1, -2) for n in "qkv"}
    assert strided["k"].stride(-1) != 1
    want, got = (vllm.chunk_gated_delta_rule(**c)[0] for c in (call | {"initial_state": states(4)}, strided))
    assert torch.equal(want, got)


WAYS = {
    "fla": (fla.chunk_gated_delta_rule, lambda: operands(1, TOKENS) | {"cu_seqlens": starts_of(LENGTHS), "output_final_state": True}),
    "flashinfer": (
        flashinfer.chunk_gated_delta_rule,
        lambda: flashinfer_call(
            state_indices=SLOTS, initial_state=states(9), output_state=states(9), output_final_state=True, **checkpointed()
        ),
    ),
    "vllm": (vllm.chunk_gated_delta_rule, lambda: vllm_call(initial_state=states(4, BF16))),
    "vllm-flashinfer": (vllm.fi_chunk_gated_delta_rule, lambda: vllm_call(initial_state=states(4), **checkpointed())),
    "sglang": (sglang.chunk_gated_delta_rule, lambda: sglang_call(initial_state=states(9))),
    "sglang's backend": (
        sglang_delta.extend, lambda: extend_call(states(9), self=None, track_state=states(4), track_chunk_idx=TRACKED),
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_tensor_is_read_by_the_host(way):
    """A fake tensor holds no values: a read of a value is an error."""
    function, make = WAYS[way]
    call = make()
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        function(**{n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in call.items()})


BOUND = 6e-3 + 2**-9  # of kernels against float64, and the rounding to 16 bits


@needs_emulator
@pytest.mark.parametrize(
    "way", [pytest.param("fla", marks=pytest.mark.matrix), "flashinfer", pytest.param("vllm", marks=pytest.mark.matrix), "sglang"]
)
def test_kernels_make_what_is_asked_for(way, monkeypatch):
    """In the emulator: states of two dtypes and layouts, in slots, and at places that some sequences do not have."""
    case = Case("chunk_gated_delta_rule")
    run = partial(emulated, case)
    monkeypatch.setattr(delta_prompts, case.function, lambda *t, **more: run(**dict(zip(case.per_token, t, strict=True)), **more))
    pool, buffer = pages(9, *POOL), torch.zeros(len(LENGTHS), *POOL)
    before = pool[SLOTS.long()]
    if way == "fla":
        call, kv = operands(1, TOKENS), states(len(LENGTHS), BF16, "kv")
        o, last = fla.chunk_gated_delta_rule(**call, initial_state=kv, output_final_state=True, cu_seqlens=starts_of(LENGTHS))
        y, each = walks(call, LENGTHS, kv.transpose(2, 3))
        last = last.transpose(2, 3)
    elif way == "flashinfer":
        more = checkpointed()
        more["checkpoint_cu_starts"], rows = more["checkpoint_cu_starts"].int(), more["state_checkpoints"]
        call = flashinfer_call(state_indices=SLOTS, initial_state=pool, output_state=pool, output_final_state=True, **more)
        o, last = flashinfer.chunk_gated_delta_rule(**call)
        y, each = walks(logs(call), LENGTHS, before)
        assert close(rows[0], each[0][CHUNK], BOUND) and close(rows[1], each[3][CHUNK], BOUND) and (rows[2] == UNTOUCHED).all()
        last = torch.stack([before[i] if not n else last[slot] for i, (n, slot) in enumerate(zip(LENGTHS, SLOTS, strict=True))])
    elif way == "vllm":
        call = vllm_call(initial_state=before)
        o, last = vllm.chunk_gated_delta_rule(**call)
        y, each = walks(call, LENGTHS, before)
    else:
        o, *_ = sglang_delta.extend(None, **extend_call(pool, track_state=buffer, track_chunk_idx=TRACKED))
        y, each = walks(sglang_call(), LENGTHS, before, norm=True)
        last = torch.stack([before[i] if not n else pool[slot] for i, (n, slot) in enumerate(zip(LENGTHS, SLOTS, strict=True))])
        assert all(close(buffer[i], each[i][chunk * CHUNK], BOUND) for i, chunk in enumerate(TRACKED.tolist()) if chunk >= 0)
    assert close(o.flatten(0, -3), y, BOUND) and all(close(last[i], S[-1], BOUND) for i, S in enumerate(each))


# Refused calls: the error's words, and nothing is written.


@pytest.mark.parametrize(
    ("function", "call", "kind", "words"),
    [
        (vllm.chunk_gated_delta_rule, vllm_call(core_attn_out=torch.zeros(9, dtype=BF16)), ArgumentError, r"core_attn_out is \[9\]"),
        (vllm.chunk_gated_delta_rule, vllm_call(initial_state=states(3)), ArgumentError, "initial_states"),
        (vllm.chunk_gated_delta_rule, vllm_call(g=None), ArgumentError, "g is None"),
        (vllm.fi_chunk_gated_delta_rule, vllm_call(initial_state=states(4), cu_seqlens=None), ArgumentError, "cu_seqlens is None"),
        (sglang.chunk_gated_delta_rule, sglang_call(), UnsupportedError, "initial_state is None"),
        (sglang.chunk_gated_delta_rule, sglang_call(initial_state=states(9), head_first=True), UnsupportedError, r"head_first is True; "
            r"expected False: operands are \[B, T, heads, …\]"),
        (sglang.chunk_gated_delta_rule, sglang_call(initial_state=states(9), initial_state_indices=SLOTS[:2]), ArgumentError, "initial_s"),
        (sglang_delta.extend, extend_call(states(9), self=None, track_state=states(4)), ArgumentError, "is None; expected both or neither"),
        (
            sglang_delta.extend,
            extend_call(states(9), self=None, track_state=states(4), track_chunk_idx=TRACKED[:2]),
            ArgumentError, r"track_chunk_idx is \[2\]",
        ),
        (
            sglang_delta.extend,
            extend_call(states(9), self=None, track_state=states(4), track_chunk_idx=TRACKED[0]),
            ArgumentError, r"track_chunk_idx is \[\]; expected \[N\]",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(function, call, kind, words):
    assert_refused(function, call, kind, words)
