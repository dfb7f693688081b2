"""Drop-ins for Mamba-2's prompts against token-by-token float64, and against the form without states that mamba-ssm documents."""

from __future__ import annotations

import inspect

import pytest
import torch
from emulated_calls import needs_emulator
from engine_calls import pages
from prompt_oracles import (
    BF16,
    F32,
    LENGTHS,
    POOL,
    SLOTS,
    TOKENS,
    H,
    P,
    attention,
    close,
    ids_of,
    operands,
    randn,
    row_of,
    sglang_call,
    starts_of,
    states,
    tokens_of,
    vllm_call,
    walk,
    walks,
)  # fmt: skip
from scan_cases import BOUNDS, emulated
from torch._subclasses.fake_tensor import FakeTensorMode

from ssmgen import chunk_scan
from ssmgen.compat import mamba_ssm, sglang, trtllm, vllm
from ssmgen.compat.shared import mamba_prompts
from ssmgen.errors import ArgumentError, UnsupportedError

# mamba-ssm


@pytest.mark.parametrize("chunk_size", [8, 33, 256])
@pytest.mark.parametrize("given", ["plain", "gate", "limits"])
def test_mamba_ssm_rows(given, chunk_size):
    more = {"plain": {}, "gate": {"z": True, "D": randn(H, P, seed=8, dtype=F32)}, "limits": {"dt_limit": (0.1, 0.8)}}[given]
    call, before = operands(2, 41, **more), states(2)
    out, last = mamba_ssm.mamba_chunk_scan_combined(**call, chunk_size=chunk_size, initial_states=before, return_final_states=True)
    assert out.is_contiguous() and last.dtype == F32
    for b in range(2):
        y, each = walk(tokens_of(call, slice(None), b), before[b])
        assert close(out[b], y) and close(last[b], each[-1])


def test_mamba_ssm_clamps_steps_without_softplus():
    """The limits that are there unasked begin at 0."""
    call = operands(1, 30, dt_softplus=False, dt_bias=None)
    assert (call["dt"] < 0).any()
    out = mamba_ssm.mamba_chunk_scan_combined(**call, chunk_size=64)
    assert close(out[0], walk(row_of(call))[0])


@pytest.mark.parametrize("state_dtype", [None, F32])
@pytest.mark.parametrize("final", [False, True])
def test_mamba_ssm_packed_sequences(final, state_dtype):
    """Parted by seq_idx; the states of cu_seqlens are of C's dtype, final ones f32. A tail is in no sequence, and has the last state."""
    lengths = (*LENGTHS, 9)
    call, starts = operands(1, sum(lengths)), starts_of(LENGTHS)
    results = mamba_ssm.mamba_chunk_scan_combined(
        **call, chunk_size=16, seq_idx=ids_of(lengths), cu_seqlens=starts, return_final_states=final, return_varlen_states=True,
        state_dtype=state_dtype,
    )  # fmt: skip
    out, *last, varlen = results
    y, each = walks(row_of(call), lengths)
    assert close(out[0], y) and close(out[0], attention(row_of(call), ids_of(lengths)[0]))
    assert len(last) == final and varlen.dtype == (state_dtype or BF16)
    assert all(close(varlen[i], each[i][-1]) for i in range(len(LENGTHS)))
    assert all(t.dtype == F32 and close(t[0], each[-1][-1]) for t in last)


def test_mamba_ssm_leading_sequences_without_tokens():
    lengths = (0, 0, 12, 0)
    call = operands(1, 12)
    out, varlen = mamba_ssm.mamba_chunk_scan_combined(
        **call, chunk_size=16, seq_idx=ids_of(lengths), cu_seqlens=starts_of(lengths, dtype=torch.int64), return_varlen_states=True
    )
    _, each = walks(row_of(call), lengths)
    assert all(close(varlen[i], each[i][-1]) for i in range(4))


def test_mamba_ssm_ignores_starts_that_no_states_are_asked_of():
    call = operands(1, 20)
    out = mamba_ssm.mamba_chunk_scan_combined(**call, chunk_size=16, cu_seqlens=starts_of((5, 15)))
    assert torch.equal(out, mamba_ssm.mamba_chunk_scan_combined(**call, chunk_size=16))


# vLLM


@pytest.mark.parametrize("before", [None, F32, BF16], ids=["from nothing", "f32", "bf16"])
@pytest.mark.parametrize("state_dtype", [None, F32])
def test_vllm_states_after_chunks(before, state_dtype):
    """Chunks are shorter than chunk_size in the middle of a sequence; of the last ones vLLM takes the states after sequences."""
    before = None if before is None else states(len(LENGTHS), before)
    call = vllm_call(checkpoint=45, initial_states=before, state_dtype=state_dtype)
    after = vllm.mamba_chunk_scan_combined_varlen(**call, return_intermediate_states=True)
    y, each = walks(call, LENGTHS, before)
    starts, ends = call["cu_seqlens"].tolist(), call["cu_chunk_seqlens"].tolist()
    assert 45 in ends and after.dtype == (state_dtype or BF16) and after.shape[0] == len(ends) - 1
    assert close(call["out"], y)
    for c, i in enumerate(call["seq_idx"].tolist()):
        assert close(after[c], each[i][ends[c + 1] - starts[i]])
    last = vllm.mamba_chunk_scan_combined_varlen(**call)
    assert last.dtype == after.dtype
    for i, length in enumerate(LENGTHS):
        assert close(last[i], each[i][-1])
        assert not length or torch.equal(last[i], after[call["last_chunk_indices"][i]])


@pytest.mark.parametrize(("before", "dtype"), [(None, F32), (None, BF16), (F32, F32), (BF16, BF16), (BF16, F32)])
def test_vllm_states_into_the_pool(before, dtype):
    """Slots are parts of pages, and there may be more of them than sequences; other slots stay."""
    lengths = (17, 2, 1, 40, 6)
    before, pool = None if before is None else states(5, before), pages(9, *POOL, dtype=dtype)
    kept, call = pool.clone(), vllm_call(lengths, initial_states=before)
    slots = torch.cat([SLOTS, torch.tensor([8])]).int()
    assert vllm.mamba_chunk_scan_combined_varlen(**call, final_states_out=pool, final_state_indices=slots) is None
    y, each = walks(call, lengths, before)
    assert close(call["out"], y)
    for i, slot in enumerate(SLOTS):
        assert close(pool[slot], each[i][-1])
        pool[slot] = kept[slot]
    assert torch.equal(pool, kept), "another slot was written"


@pytest.mark.parametrize("bad", [-1, 9, 1000])
def test_vllm_slots_of_no_page_are_padding(bad):
    lengths = (17, 2, 1, 40, 6)
    for before in (None, states(5)):
        pool, slots, call = pages(9, *POOL), SLOTS.clone(), vllm_call(lengths, initial_states=before)
        kept, slots[2] = pool.clone(), bad
        vllm.mamba_chunk_scan_combined_varlen(**call, final_states_out=pool, final_state_indices=slots)
        untouched = [s for s in range(9) if s not in SLOTS[[0, 1, 3, 4]]]
        assert torch.equal(pool[untouched], kept[untouched]) and not torch.equal(pool[5], kept[5])
        assert not call["out"][19].any() and call["out"][20:].isfinite().all()


# SGLang


def state_at(each, position):
    """The state after `position` packed tokens, of the sequence that has the last of them."""
    starts = starts_of(LENGTHS).tolist()
    i = max(i for i, s in enumerate(starts[:-1]) if s < position and LENGTHS[i])
    return each[i][position - starts[i]]


@pytest.mark.parametrize("state_dtype", [None, F32])
@pytest.mark.parametrize("before", [None, BF16], ids=["from nothing", "from states"])
@pytest.mark.parametrize("tracked", [None, (33, 5, 57), ()])
def test_sglang_layers(tracked, before, state_dtype):
    """States before chunks, after sequences, and at tracked tokens, which need not be in order."""
    before = None if before is None else states(len(LENGTHS), before)
    call = sglang_call(initial_states=before, state_dtype=state_dtype, return_track_states=True)
    if tracked is not None:
        call |= {"track_end_locs": torch.tensor(tracked, dtype=torch.int32), "track_seq_idx": torch.zeros(len(tracked), dtype=torch.long)}
    chunks, varlen, ends = sglang.mamba_chunk_scan_combined(**call)
    y, each = walks(row_of(call), LENGTHS, before)
    assert close(call["out"][0], y) and varlen.dtype == (state_dtype or BF16)
    assert all(close(varlen[i], each[i][-1]) for i in range(len(LENGTHS)))
    if tracked is None:
        assert chunks is None and ends is None, "no layer reads them then"
        return
    assert chunks.dtype == varlen.dtype and chunks.shape[:2] == (1, 4)
    assert close(chunks[0, 0], each[0][0]) and all(close(chunks[0, c], state_at(each, 16 * c)) for c in (1, 2, 3))
    if tracked:
        assert ends.dtype == chunks.dtype and ends.shape[:2] == (1, 3)
        assert all(close(ends[0, i], state_at(each, end)) for i, end in enumerate(tracked))
    else:
        assert ends is None


@pytest.mark.parametrize(
    "wanted", ["", "final", "intermediate", "intermediate final", "varlen", "final varlen", "intermediate final varlen"]
)
def test_sglang_returns_what_is_asked_for(wanted):
    """The states come in its order: [batch, chunks, …], [batch, …] f32, [sequences, …]."""
    asked = wanted.split()
    flags = {f"return_{name}_states": name in asked for name in ("intermediate", "final", "varlen")}
    call = sglang_call(state_dtype=BF16)
    got = sglang.mamba_chunk_scan_combined(**call | flags)
    results = dict(zip(asked, got if isinstance(got, tuple) else (got,), strict=False))
    assert isinstance(got, tuple) == (len(asked) > 1) and (got is None) == (not asked)
    y, each = walks(row_of(call), LENGTHS)
    assert close(call["out"][0], y)
    if "intermediate" in asked:
        assert results["intermediate"].dtype == BF16 and close(results["intermediate"][0, 2], state_at(each, 32))
    if "final" in asked:
        assert results["final"].dtype == F32 and close(results["final"][0], each[-1][-1])
    if "varlen" in asked:
        assert results["varlen"].dtype == BF16 and close(results["varlen"][3], each[3][-1])


def test_sglang_rows():
    """States before the chunks of several rows; the first is the row's initial one, not the last of the row ahead."""
    call, before = operands(3, 40), states(3)
    chunks, last = sglang.mamba_chunk_scan_combined(
        **call, chunk_size=16, initial_states=before, return_intermediate_states=True, return_final_states=True, state_dtype=F32
    )
    assert chunks.shape[:2] == (3, 3)
    for b in range(3):
        _, each = walk(tokens_of(call, slice(None), b), before[b])
        assert close(last[b], each[-1]) and torch.equal(chunks[b, 0], before[b])
        assert close(chunks[b, 1], each[16]) and close(chunks[b, 2], each[32])


# TensorRT-LLM


@pytest.mark.parametrize("before", [None, F32], ids=["from nothing", "from states"])
@pytest.mark.parametrize("generation", ["out", "returned"])
def test_trtllm_layers(generation, before):
    before = None if before is None else states(len(LENGTHS), before)
    call = {n: t for n, t in sglang_call(initial_states=before).items() if generation == "out" or n != "out"}
    call |= {"state_dtype" if generation == "out" else "mamba_ssm_cache_dtype": F32}
    got = trtllm.mamba_chunk_scan_combined(**call)
    out, varlen = (call["out"], got) if generation == "out" else got
    y, each = walks(row_of(call), LENGTHS, before)
    assert close(out[0], y) and varlen.dtype == F32 and all(close(varlen[i], each[i][-1]) for i in range(len(LENGTHS)))
    final, varlen = trtllm.mamba_chunk_scan_combined(**call | {"out": out, "return_final_states": True})
    assert final.shape[0] == 1 and close(final[0], each[-1][-1]) and close(varlen[3], each[3][-1])


# All of them


def test_rows_that_are_not_contiguous_are_copied():
    call = operands(1, 20)
    strided = {n: call[n].transpose(-1, -2).contiguous().transpose(-1, -2) for n in ("x", "B", "C")}
    assert strided["B"].stride(-1) != 1
    wanted = mamba_ssm.mamba_chunk_scan_combined(**call, chunk_size=16)
    assert torch.equal(mamba_ssm.mamba_chunk_scan_combined(**call | strided, chunk_size=16), wanted)


@pytest.mark.parametrize(
    ("more", "passed"), [({}, None), ({"dt_limit": (0.0, 2.0)}, (0.0, 2.0)), ({"dt_softplus": False}, (0.0, float("inf")))]
)
def test_limits_that_say_nothing_ask_for_no_other_kernel(more, passed, monkeypatch):
    seen = []
    monkeypatch.setattr(mamba_prompts, "chunk_scan", lambda *args, dt_limit=None, **rest: seen.append(dt_limit))
    vllm.mamba_chunk_scan_combined_varlen(**vllm_call() | more)
    assert seen == [passed]


@pytest.mark.parametrize("way", ["mamba_ssm", "vllm", "pool", "sglang", "trtllm"])
def test_nothing_of_a_tensor_is_read_by_the_host(way):
    """A fake tensor holds no values: a read of a value is an error."""
    track = {"return_track_states": True, "track_end_locs": SLOTS, "track_seq_idx": SLOTS}
    packed = {"seq_idx": ids_of(LENGTHS), "cu_seqlens": starts_of(LENGTHS), "return_varlen_states": True, "return_final_states": True}
    functions = {
        "mamba_ssm": (mamba_ssm.mamba_chunk_scan_combined, operands(1, TOKENS, chunk_size=16) | packed),
        "vllm": (vllm.mamba_chunk_scan_combined_varlen, vllm_call(return_intermediate_states=True)),
        "pool": (
            vllm.mamba_chunk_scan_combined_varlen,
            vllm_call(initial_states=states(5), final_states_out=pages(9, *POOL), final_state_indices=SLOTS),
        ),
        "sglang": (sglang.mamba_chunk_scan_combined, sglang_call(**track)),
        "trtllm": (trtllm.mamba_chunk_scan_combined, sglang_call(return_final_states=True)),
    }
    function, call = functions[way]
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        function(**{n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in call.items()})


@needs_emulator
@pytest.mark.parametrize("way", ["mamba_ssm", "vllm", "pool", "sglang"])
def test_kernels_make_what_is_asked_for(way, monkeypatch):
    """In the emulator: states at equal positions, out of order, and at none; dense states and states in slots."""
    names = list(inspect.signature(chunk_scan).parameters)
    monkeypatch.setattr(mamba_prompts, "chunk_scan", lambda *args, **more: emulated(**dict(zip(names, args, strict=False)), **more))
    bound, before = BOUNDS[BF16], states(len(LENGTHS))
    call, lengths = operands(1, TOKENS), LENGTHS
    y, each = walks(row_of(call), lengths, None if way == "mamba_ssm" else before)
    if way == "mamba_ssm":
        more = {"seq_idx": ids_of(lengths), "cu_seqlens": starts_of(lengths), "return_varlen_states": True, "state_dtype": F32}
        out, last = mamba_ssm.mamba_chunk_scan_combined(**call, chunk_size=16, **more)
        assert close(out[0], y, bound) and all(close(last[i], each[i][-1], bound) for i in range(len(lengths)))
    elif way == "sglang":
        call = sglang_call(z=None, initial_states=before, state_dtype=F32, return_track_states=True)
        call |= {"track_end_locs": torch.tensor([33, 16, 57]), "track_seq_idx": torch.tensor([3, 0, 3])}
        chunks, last, ends = sglang.mamba_chunk_scan_combined(**call)
        assert close(call["out"][0], y, bound) and all(close(last[i], each[i][-1], bound) for i in range(len(lengths)))
        assert all(close(chunks[0, c], state_at(each, 16 * c), bound) for c in (1, 2, 3)) and close(chunks[0, 0], before[0])
        assert all(close(ends[0, i], state_at(each, end), bound) for i, end in enumerate((33, 16, 57)))
    else:
        call = vllm_call(checkpoint=45, state_dtype=F32)
        pool = pages(9, *POOL)
        more = {"initial_states": before} | ({"final_states_out": pool, "final_state_indices": SLOTS} if way == "pool" else {})
        after = vllm.mamba_chunk_scan_combined_varlen(**call, **more, return_intermediate_states=way == "vllm")
        assert close(call["out"], y, bound)
        if after is None:
            assert all(close(pool[slot], each[i][-1], bound) for i, slot in enumerate(SLOTS) if lengths[i])
        else:
            ends = call["cu_chunk_seqlens"].tolist()[1:]
            assert all(close(after[c], state_at(each, end), bound) for c, end in enumerate(ends))


# Refused calls: the error's words, and nothing is written.

X = operands(1, TOKENS, chunk_size=16)
PACKED = {"cu_seqlens": starts_of(LENGTHS), "seq_idx": ids_of(LENGTHS), "return_varlen_states": True}
POOLED = {"initial_states": states(5), "final_states_out": pages(9, *POOL), "final_state_indices": SLOTS}


@pytest.mark.parametrize(
    ("engine", "call", "kind", "words"),
    [
        (mamba_ssm, X | {"x": X["x"].detach().requires_grad_()}, ArgumentError, "x requires grad"),
        (mamba_ssm, X | PACKED | {"seq_idx": None}, UnsupportedError, "return_varlen_states is True and seq_idx is None; expected seq_idx"),
        (mamba_ssm, X | PACKED | {"cu_seqlens": None}, ArgumentError, "return_varlen_states is True and cu_seqlens is None"),
        (mamba_ssm, operands(2, 9, chunk_size=16) | PACKED, ArgumentError, r"x is \[2, 9, 4, 16\]; expected one row, in which cu_seqlens "
            "packs the sequences"),
        (mamba_ssm, X | PACKED | {"state_dtype": torch.float64}, UnsupportedError, "state_dtype is float64"),
        (mamba_ssm, X | {"x": X["x"][0]}, ArgumentError, r"x is \[64, 4, 16\]; expected \[batch, T, H, P\]"),
        (mamba_ssm, X | {"return_final_states": X["x"]}, ArgumentError, "return_final_states is a Tensor; expected True or False"),
        (vllm, vllm_call(out=None), ArgumentError, "out is None"),
        (vllm, vllm_call(**POOLED, return_intermediate_states=True), ArgumentError, "final_states_out is given with "
            "return_intermediate_states"),
        (vllm, vllm_call(**POOLED | {"final_state_indices": None}), ArgumentError, "without final_state_indices"),
        (vllm, vllm_call(cu_chunk_seqlens=None, return_intermediate_states=True), ArgumentError, "cu_chunk_seqlens is None"),
        (vllm, vllm_call(**POOLED | {"final_states_out": pages(9, H, P, 8)}), ArgumentError, r"state is \[9, 4, 16, 8\]"),
        (vllm, vllm_call(**POOLED | {"final_state_indices": SLOTS[:3]}), ArgumentError, r"state_indices is \[3\]; expected \[sequences\]"),
        (vllm, vllm_call(**POOLED | {"final_states_out": pages(9, *POOL, dtype=BF16)}), ArgumentError, "state is bfloat16"),
        (sglang, sglang_call(return_track_states=True, return_varlen_states=False), ArgumentError, "return_track_states is True without "
            "return_varlen_states"),
        (sglang, sglang_call(return_intermediate_states=True, chunk_size=0), ArgumentError, "chunk_size is 0"),
        (sglang, sglang_call(seq_idx=None), UnsupportedError, "return_varlen_states is True and seq_idx is None; expected seq_idx"),
        (trtllm, sglang_call(state_dtype=F32, mamba_ssm_cache_dtype=F32), ArgumentError, "the same argument"),
    ],
)  # fmt: skip
def test_what_is_refused(engine, call, kind, words):
    name = "mamba_chunk_scan_combined_varlen" if engine is vllm else "mamba_chunk_scan_combined"
    written = [t for n in ("out", "final_states_out") if (t := call.get(n)) is not None]
    before = [t.clone() for t in written]
    with pytest.raises(kind, match=words) as caught:
        getattr(engine, name)(**call)
    assert name in str(caught.value) or "chunk_scan" in str(caught.value)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(written, before, strict=True))
