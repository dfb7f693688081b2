"""Drop-ins for prompts of delta rules against token-by-token float64."""

from __future__ import annotations

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
    UNTOUCHED,
    K,
    V,
    assert_refused,
    checkpointed,
    close,
    flashinfer_call,
    gates,
    logs,
    operands,
    randn,
    starts_of,
    states,
    walk,
    walks,
)
from engine_calls import pages

from ssmgen.compat import fla, flashinfer
from ssmgen.compat.shared import replacing
from ssmgen.errors import ArgumentError, UnsupportedError

# The packages' published parameters, without annotations.
FLA = (
    "scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, {} cu_seqlens=None, cu_seqlens_cpu=None, {} "
    "**kwargs"
)
SIGNATURES = {
    fla.chunk_gated_delta_rule: "q, k, v, g, beta, "
    + FLA.format("use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,", "chunk_indices=None, cp_context=None,"),
    fla.chunk_delta_rule: "q, k, v, beta, " + FLA.format("", ""),
    flashinfer.chunk_gated_delta_rule: (
        "q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, "
        "use_qk_l2norm_in_kernel=False, output=None, output_state=None, state_checkpoints=None, checkpoint_cu_starts=None, "
        "checkpoint_every_n_tokens=0, use_cp='auto', state_indices=None, _cp_chunk_len=None, backend='auto', max_seqlen=None"
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__.rpartition('.')[2]}.{f.__name__}")
def test_our_parameters_are_the_published_ones(function):
    made: dict = {}
    exec(f"def theirs({SIGNATURES[function]}): pass", made)
    assert replacing.differences(function, made["theirs"]) == []


# flash-linear-attention


@pytest.mark.parametrize(("packed", "v_first", "dtype"), [(True, False, BF16), (True, True, F32), (False, False, None)])
def test_fla_sequences(packed, v_first, dtype):
    """Final states are f32 and new, for initial states of every dtype; the layout is fla's."""
    lengths, layout = LENGTHS if packed else (66, 66), "vk" if v_first else "kv"
    call, before = operands(1, TOKENS) if packed else operands(2, 66), None
    if dtype is not None:
        before = states(len(lengths), dtype, layout)
    kept = None if before is None else before.clone()
    more = {"cu_seqlens": starts_of(lengths, torch.int64), "chunk_indices": SLOTS, "cu_seqlens_cpu": starts_of(lengths)} if packed else {}
    o, last = fla.chunk_gated_delta_rule(
        **call, initial_state=before, output_final_state=True, state_v_first=v_first, use_qk_l2norm_in_kernel=True, scale=0.3, **more
    )
    turned = before if before is None or v_first else before.transpose(2, 3)
    y, each = walks(call, lengths, turned, norm=True, scale=0.3)
    assert o.dtype == BF16 and o.is_contiguous() and close(o.flatten(0, 1), y)
    assert last.dtype == F32 and all(close(last[i] if v_first else last[i].transpose(1, 2), S[-1]) for i, S in enumerate(each))
    assert before is None or torch.equal(before, kept)


@pytest.mark.parametrize("twice", [False, True])
def test_fla_gates_and_logits_in_the_kernel(twice):
    call, A_log, dt_bias = operands(1, 20), randn(HV, seed=4, dtype=F32) / 2, randn(HV, seed=5, dtype=F32)
    raw, logit = randn(1, 20, HV, seed=6), randn(1, 20, HV, seed=8)
    o, _ = fla.chunk_gdn(
        **call | {"g": raw, "beta": logit}, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=twice, chunk_size=32,
    )  # fmt: skip
    beta = logit.double().sigmoid() * (2 if twice else 1)
    assert close(o[0], walks(call | {"g": gates(raw, A_log, dt_bias), "beta": beta}, (20,))[0])
    shaped, _ = fla.chunk_gated_delta_rule(
        **call | {"g": raw, "beta": logit}, use_gate_in_kernel=True, A_log=A_log.reshape(1, 1, HV, 1), dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=twice,
    )  # fmt: skip
    assert torch.equal(shaped, o), "A_log has any shape of HV elements"
    off, last = fla.chunk_gated_delta_rule(**call, use_gate_in_kernel=False, A_log=A_log, dt_bias=dt_bias)
    assert last is None and close(off[0], walks(call, (20,))[0]), "without use_gate_in_kernel they do not count"


def test_fla_delta_rule():
    call, before = operands(1, TOKENS), states(len(LENGTHS), layout="kv")
    del call["g"]
    o, last = fla.chunk_delta_rule(**call, initial_state=before, output_final_state=True, cu_seqlens=starts_of(LENGTHS), chunk_size=16)
    y, each = walks(call, LENGTHS, before.transpose(2, 3))
    assert close(o[0], y) and all(close(last[i].transpose(1, 2), S[-1]) for i, S in enumerate(each))


def test_fla_prompts_go_on_in_steps():
    """fused_recurrent_gated_delta_rule takes the last states, and returns the same ones."""
    call, options = operands(1, 70), {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    o, last = fla.chunk_gated_delta_rule(**call, **options)
    again, same = fla.fused_recurrent_gated_delta_rule(**call, **options)
    assert close(o, again.double()) and close(last, same.double())


# FlashInfer


@pytest.mark.parametrize("dtypes", [(None, None), (BF16, BF16), (BF16, F32), (F32, BF16)])
def test_flashinfer_states(dtypes):
    """States may have two dtypes. Returned states are f32 if no tensor is given for them."""
    first, last = dtypes
    before = None if first is None else states(len(LENGTHS), first)
    into = None if last is None else torch.full((len(LENGTHS), *POOL), torch.nan, dtype=last)
    call = flashinfer_call(initial_state=before, output_state=into, output_final_state=True, scale=0.0, max_seqlen=99, use_cp=False)
    output, final = flashinfer.chunk_gated_delta_rule(**call)
    y, each = walks(logs(call), LENGTHS, before)
    assert output.dtype == BF16 and close(output, y)
    assert (final is into or into is None) and final.dtype == (last or F32) and all(close(final[i], S[-1]) for i, S in enumerate(each))


@pytest.mark.parametrize("missing", ["g", "beta"])
def test_flashinfer_gates_that_are_one(missing):
    call = flashinfer_call(**{missing: None}, output=torch.full((TOKENS, HV, V), torch.nan, dtype=BF16), backend="flashinfer")
    output = flashinfer.chunk_gated_delta_rule(**call)
    assert output is call["output"] and close(output, walks(logs(call))[0])


def test_flashinfer_forgets_where_the_decay_is_zero():
    call = flashinfer_call((20,), initial_state=states(1))
    call["g"][9] = 0
    a, b = ({n: call[n][part] for n in ("q", "k", "v", "g", "beta")} for part in (slice(9), slice(9, None)))
    b["g"] = torch.cat([torch.ones(1, HV), b["g"][1:]])  # from nothing, with nothing to forget
    y = torch.cat([walk(logs(a), call["initial_state"][0])[0], walk(logs(b))[0]])
    assert close(flashinfer.chunk_gated_delta_rule(**call), y)


def test_flashinfer_more_heads_of_q_than_of_v():
    """Head h of q uses head h // 2 of k and v, and has a separate state."""
    call = flashinfer_call(output_final_state=True) | {"q": randn(TOKENS, 2 * HV, K, seed=3), "k": randn(TOKENS, HV, K, seed=4) / 6}
    call |= {n: call[n].repeat(1, 2) * 0.9 for n in ("g", "beta")} | {"initial_state": torch.cat([states(len(LENGTHS))] * 2, 1)}
    repeated = call | {n: call[n][:, [h // 2 for h in range(2 * HV)]] for n in ("k", "v")}
    (output, final), (y, last) = (flashinfer.chunk_gated_delta_rule(**c) for c in (call, repeated))
    assert output.shape == (TOKENS, 2 * HV, V) and torch.equal(output, y) and torch.equal(final, last)


def test_flashinfer_final_state_of_a_sequence_without_tokens_is_its_initial_one():
    before, lengths = states(2), (20, 0)
    into = torch.full((2, *POOL), UNTOUCHED)
    flashinfer.chunk_gated_delta_rule(**flashinfer_call(lengths, initial_state=before, output_state=into, output_final_state=True))
    assert torch.equal(into[1], before[1])
    flashinfer.chunk_gated_delta_rule(**flashinfer_call(lengths, output_state=into, output_final_state=True))
    assert not into[1].any()


@pytest.mark.parametrize("way", ["in place", "to another", "from nothing", "only read"])
def test_flashinfer_pools(way):
    pool, other = pages(9, *POOL), pages(9, *POOL, dtype=F32)
    before = None if way == "from nothing" else pool[SLOTS.long()].clone()
    into = {"in place": pool, "to another": other, "from nothing": other, "only read": None}[way]
    kept, kept_other = pool.clone(), other.clone()
    call = flashinfer_call(state_indices=SLOTS, initial_state=None if before is None else pool, output_state=into)
    got = flashinfer.chunk_gated_delta_rule(**call, output_final_state=into is not None)
    y, each = walks(logs(call), LENGTHS, before)
    if into is None:
        assert close(got, y) and torch.equal(pool, kept)
        return
    assert got[1] is into and close(got[0], y)
    for i, slot in enumerate(SLOTS.tolist()):
        if LENGTHS[i]:
            assert close(into[slot], each[i][-1])
            into[slot] = (kept if into is pool else kept_other)[slot]
    assert torch.equal(pool, kept) and torch.equal(other, kept_other), "another slot was written"


@pytest.mark.parametrize("bad", [-1, 9])
def test_flashinfer_slots_of_no_pool_are_padding(bad):
    pool, slots = pages(9, *POOL), SLOTS.clone()
    slots[0], kept = bad, pool.clone()
    call = flashinfer_call(state_indices=slots, initial_state=pool, output_state=pool, output_final_state=True)
    output, _ = flashinfer.chunk_gated_delta_rule(**call)
    assert not output[:66].any() and output.any(-1).any(-1)[66:].all()
    untouched = [s for s in range(9) if s not in (3, 7)]
    assert torch.equal(pool[untouched], kept[untouched]) and not torch.equal(pool[7], kept[7])


@pytest.mark.parametrize(("pool", "every", "dtype"), [(True, CHUNK, F32), (True, 2 * CHUNK, F32), (False, CHUNK, BF16)])
def test_flashinfer_checkpoints(pool, every, dtype):
    """Sequences shorter than that have none; rows after the last one stay unchanged."""
    lengths = (130, 0, 1, 64)
    checkpoints = checkpointed(lengths, dtype, every)
    rows, first = checkpoints["state_checkpoints"], checkpoints["checkpoint_cu_starts"].tolist()
    more = {"initial_state": pages(9, *POOL), "state_indices": SLOTS} if pool else {"initial_state": states(len(lengths))}
    before = more["initial_state"][SLOTS.long()].clone() if pool else more["initial_state"]
    more |= {"output_state": more["initial_state"]} if pool else {}
    call = flashinfer_call(lengths, **more, **checkpoints)
    output, _ = flashinfer.chunk_gated_delta_rule(**call, output_final_state=True)
    y, each = walks(logs(call), lengths, before)
    assert close(output, y) and (rows[first[-1] :] == UNTOUCHED).all() and len(rows) == first[-1] + 1
    for i, length in enumerate(lengths):
        assert first[i + 1] - first[i] == length // every
        assert all(close(rows[first[i] + n], each[i][(n + 1) * every]) for n in range(length // every))


# Refused calls: the error's words, and nothing is written.

X = operands(1, 4)
PACKED = flashinfer_call()
PREFILL = flashinfer.chunk_gated_delta_rule


@pytest.mark.parametrize(
    ("function", "call", "kind", "words"),
    [
        (fla.chunk_gated_delta_rule, X | {"g": None}, ArgumentError, "g is None"),
        (fla.chunk_gated_delta_rule, X | {"cp_context": object()}, NotImplementedError, "cp_context"),
        (fla.chunk_gated_delta_rule, X | {"head_first": True}, NotImplementedError, "head_first"),
        (fla.chunk_gated_delta_rule, X | {"use_gate_in_kernel": True}, ArgumentError, "A_log is None"),
        (fla.chunk_gated_delta_rule, X | {"allow_neg_eigval": True}, ArgumentError, "allow_neg_eigval is True and "
            "use_beta_sigmoid_in_kernel False; expected both"),
        (fla.chunk_gated_delta_rule, X | {"chunk_size": 128}, ArgumentError, "chunk_size is 128"),
        (fla.chunk_gated_delta_rule, X | {"initial_state": states(2, layout="kv")}, ArgumentError, r"\[2, 4, 32, 16\]"),
        (fla.chunk_gated_delta_rule, X | {"initial_state": states(1)}, ArgumentError, r"\[1, 4, 16, 32\]"),
        (fla.chunk_gated_delta_rule, X | {"q": X["q"][0]}, ArgumentError, r"q is \[4, 2, 32\]; expected \[B, T, H, K\]"),
        (fla.chunk_gated_delta_rule, X | {"v": X["v"].clone().requires_grad_()}, ArgumentError, "v requires grad"),
        (fla.chunk_gated_delta_rule, X | {"output_final_state": X["q"]}, ArgumentError, "output_final_state is a Tensor"),
        (fla.chunk_delta_rule, {n: X[n] for n in ("q", "k", "v", "beta")} | {"state_v_first": True}, NotImplementedError, "state_v_first"),
        (PREFILL, PACKED | {"backend": "cudnn"}, UnsupportedError, "backend is 'cudnn'; expected 'auto' or 'flashinfer'"),
        (PREFILL, PACKED | {"v": PACKED["v"][:, :1]}, UnsupportedError, "have 2, 2 and 1 heads"),
        (PREFILL, PACKED | {"cu_seqlens": None}, ArgumentError, "cu_seqlens is None"),
        (PREFILL, PACKED | {"use_cp": "yes"}, ArgumentError, "use_cp is 'yes'"),
        (PREFILL, PACKED | checkpointed() | {"checkpoint_every_n_tokens": 96}, ArgumentError, "is 96; expected a multiple of 64"),
        (PREFILL, PACKED | checkpointed() | {"checkpoint_every_n_tokens": 0}, ArgumentError, "state_checkpoints or checkpoint_cu_starts "
            "is given without checkpoint_every_n_tokens"),
        (PREFILL, PACKED | checkpointed() | {"state_checkpoints": None}, ArgumentError, "checkpoint_every_n_tokens is given "
            "without buffers"),
        (PREFILL, PACKED | {"state_indices": SLOTS, "output_final_state": True}, ArgumentError, "output_state is None with state_indices"),
        (
            PREFILL,
            PACKED | {"output_final_state": True, "output_state": states(4).to(torch.float8_e4m3fn)}, ArgumentError, "float8_e4m3fn",
        ),
        (PREFILL, PACKED | checkpointed() | {"checkpoint_cu_starts": SLOTS}, ArgumentError, r"are \[4\] and \[5\]; expected"),
        (
            PREFILL,
            PACKED | {"initial_state": states(4), "output_final_state": True, "output_state": states(1, BF16).expand(4, *POOL)},
            ArgumentError, "two of its elements share memory",
        ),
        (PREFILL, PACKED | {"state_indices": SLOTS.short(), "initial_state": states(9)}, ArgumentError, r"state_indices is int16 \[4\]"),
    ],
)  # fmt: skip
def test_what_is_refused(function, call, kind, words):
    assert_refused(function, call, kind, words)
