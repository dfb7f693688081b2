"""Drop-ins for Mamba-1's prompts against token-by-token float64: mamba-ssm's, vLLM's and SGLang's."""

from __future__ import annotations

import inspect

import pytest
import torch
from emulated_calls import needs_emulator
from engine_calls import no_call_goes_to_the_engine, pages, sglang_functions, vllm_functions  # noqa: F401
from engine_stand_ins import found as place_of
from mamba1_oracles import LENGTHS, SLOTS, TOKENS, D, N, by_channels, by_tokens, operands, part, sequences, vllm_call, walk
from prompt_oracles import BF16, F32, close, randn
from selective_cases import BOUNDS, emulated
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ssmgen import selective_scan
from ssmgen.compat import mamba_ssm, vllm
from ssmgen.compat.sglang import mamba as sglang_mamba
from ssmgen.compat.shared import mamba1_prompts
from ssmgen.errors import ArgumentError, UnsupportedError

# mamba-ssm


@pytest.mark.parametrize("G", [None, 1, 3])
@pytest.mark.parametrize("make", [by_tokens, by_channels])
def test_mamba_ssm_rows(G, make):
    call = operands(2, T=41, G=G, make=make)
    out, last = mamba_ssm.selective_scan_fn(**call, return_last_state=True)
    assert last.dtype == F32 and out.dtype == BF16 and out.stride() == call["u"].stride()
    for b in range(2):
        y, h = walk(part(call, row=b))
        assert close(out[b], y) and close(last[b], h)
    ordered = [call[n] for n in ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus")]
    assert torch.equal(mamba_ssm.selective_scan_fn(*ordered), out)


def test_mamba_ssm_without_what_is_optional():
    call = operands(1, T=9) | dict.fromkeys(("D", "z", "delta_bias")) | {"delta_softplus": False}
    assert close(mamba_ssm.selective_scan_fn(**call)[0], walk(part(call, row=0))[0])


@pytest.mark.parametrize("name", ["u", "delta", "z", "B", "C"])
@pytest.mark.parametrize("make", [by_tokens, by_channels])
def test_operands_in_another_order_change_no_bit(name, make):
    """One operand has another order: for example delta from a product, while u comes from a projection."""
    call, other = operands(2, T=23, make=make), by_channels if make is by_tokens else by_tokens
    turned = torch.empty_like(other(*call[name].shape, seed=0)).copy_(call[name])
    assert turned.stride() != call[name].stride()
    assert torch.equal(mamba_ssm.selective_scan_fn(**call | {name: turned}), mamba_ssm.selective_scan_fn(**call))


def test_one_order_goes_to_the_kernel(monkeypatch):
    """Operands laid out unlike u are copied. B, C and operands laid out like u are not."""
    call = operands(2, T=23)
    given = call | {"delta": call["delta"].contiguous()}
    monkeypatch.setattr(mamba1_prompts, "selective_scan", lambda *args, **more: args)
    u, delta, _, B, C, _, z, _ = mamba_ssm.selective_scan_fn(**given)
    assert delta.stride() == u.stride() and torch.equal(delta, call["delta"])
    assert all(a is b for a, b in ((u, call["u"]), (z, call["z"]), (B, call["B"]), (C, call["C"])))


# vLLM: as its layers hold it.


@pytest.mark.parametrize("G", [None, 2])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_vllm_packed_sequences(vllm, dtype, G):
    """Slots are parts of pages, and there may be more rows of indices than sequences; other slots stay, also one without tokens."""
    pool, started = pages(9, D, N, dtype=dtype), torch.tensor([True, True, False, True, False, True])
    kept, slots = pool.clone(), torch.cat([SLOTS, torch.tensor([8])]).int()
    call = vllm_call(ssm_states=pool, cache_indices=slots, has_initial_state=started, **operands(T=TOKENS, G=G))
    out = vllm.selective_scan_fn(**call)
    assert out.shape == (D, TOKENS) and out.stride() == call["u"].stride()
    for i, (sequence, y) in enumerate(zip(sequences(call), out.split(LENGTHS, -1), strict=True)):
        want, h = walk(sequence, kept[SLOTS[i]] if started[i] else None)
        assert close(y, want)
        if LENGTHS[i]:
            assert close(pool[SLOTS[i]], h)
            pool[SLOTS[i]] = kept[SLOTS[i]]
    assert torch.equal(pool, kept), "another slot was written"


@pytest.mark.parametrize("bad", [0, -1, 9])
def test_vllm_slots_of_no_page_are_padding(vllm, bad):
    slots, call = SLOTS.clone(), vllm_call()
    slots[3] = bad
    kept = call["ssm_states"].clone()
    out = vllm.selective_scan_fn(**call | {"cache_indices": slots})
    first, _, one, padded, last = out.split(LENGTHS, -1)
    assert not padded.any() and all(t.isfinite().all() and t.any() for t in (first, one, last))
    untouched = [s for s in range(9) if s not in SLOTS[[0, 2, 4]]]
    assert torch.equal(call["ssm_states"][untouched], kept[untouched])


def test_vllm_rows(vllm):
    """Without starts each row is a sequence, and without indices its number is its slot. No operand is overwritten."""
    pool, call = pages(4, D, N), operands(3, T=20)
    given = {n: t.clone() for n, t in call.items() if isinstance(t, Tensor)}
    out = vllm.selective_scan_fn(**call, ssm_states=pool, null_block_id=None)
    for b in range(3):
        y, h = walk(part(call, row=b))
        assert close(out[b], y) and close(pool[b], h)
    assert all(torch.equal(t, call[n]) for n, t in given.items())


# SGLang: a static method of its layers.


def test_sglang_layers(sglang):
    mixer = place_of("sglang.srt.layers.attention.mamba.mamba1", "MambaMixer1")
    call, before = (
        operands(T=30, make=by_channels, dtype=F32, delta_softplus=False, delta_bias=None, D=None, z=None),
        randn(D, N, seed=8, dtype=F32),
    )
    call["delta"] = call["delta"].abs()
    given = {"x": call["u"].t(), "dt": call["delta"].t(), "A": call["A"], "B": call["B"].t(), "C": call["C"].t(), "h0": before}
    for of in (mixer, mixer()):
        h, y = of._selective_scan(**given)
        want, last = walk(call, before)
        assert y.dtype == h.dtype == F32 and close(y, want.t()) and close(h, last)


# All of them.


@needs_emulator
def test_kernels_make_what_is_asked_for(monkeypatch):
    """In the emulator: packed sequences in a pool, some from a state, and one whose slot is padding."""
    names = list(inspect.signature(selective_scan).parameters)
    monkeypatch.setattr(mamba1_prompts, "selective_scan", lambda *args, **more: emulated(**dict(zip(names, args, strict=False)), **more))
    slots, started = SLOTS.clone(), torch.tensor([True, True, False, True, False])
    slots[4], call = 0, vllm_call(has_initial_state=started)
    pool = call["ssm_states"]
    kept = pool.clone()
    out = vllm.selective_scan_fn(**call | {"cache_indices": slots})
    for i, (sequence, y) in enumerate(zip(sequences(call)[:4], out.split(LENGTHS, -1), strict=False)):
        want, h = walk(sequence, kept[SLOTS[i]] if started[i] else None)
        assert close(y, want, BOUNDS[BF16]) and (not LENGTHS[i] or close(pool[SLOTS[i]], h, BOUNDS[F32]))
    assert not out[:, -LENGTHS[4] :].any() and torch.equal(pool[SLOTS[4]], kept[SLOTS[4]])


def test_nothing_of_a_tensor_is_read_by_the_host():
    """A fake tensor holds no values: a read of a value is an error."""
    functions = {
        mamba_ssm.selective_scan_fn: operands(2, T=9, return_last_state=True),
        vllm.selective_scan_fn: vllm_call(has_initial_state=SLOTS > 2),
        sglang_mamba.selective_scan: {
            "x": randn(9, D, seed=0), "dt": randn(9, D, seed=1), "A": randn(D, N, seed=2, dtype=F32), "B": randn(9, N, seed=3),
            "C": randn(9, N, seed=4), "h0": randn(D, N, seed=5, dtype=F32),
        },
    }  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        for function, call in functions.items():
            function(**{n: mode.from_tensor(t) if isinstance(t, Tensor) else t for n, t in call.items()})


ROWS, PACKED = operands(2, T=9), vllm_call()
CONSTANT = dict.fromkeys(("B", "C"), ROWS["A"])
COMPLEX = randn(D, N, seed=1, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("function", "call", "kind", "words"),
    [
        (mamba_ssm.selective_scan_fn, ROWS | {"A": COMPLEX}, UnsupportedError, "A is complex; expected real, like ssmgen's states"),
        (mamba_ssm.selective_scan_fn, ROWS | CONSTANT, UnsupportedError, r"(?s)B is \[D, N\].*C is \[D, N\], the same"),
        (mamba_ssm.selective_scan_fn, ROWS | {"u": ROWS["u"].detach().requires_grad_()}, ArgumentError, "u requires grad"),
        (mamba_ssm.selective_scan_fn, ROWS | {"u": ROWS["u"][0]}, ArgumentError, r"u is \[12, 9\]; expected \[batch, D, T\]"),
        (mamba_ssm.selective_scan_fn, ROWS | {"return_last_state": SLOTS}, ArgumentError, "return_last_state is a Tensor"),
        (vllm.selective_scan_fn, PACKED | {"initial_state_idx": SLOTS, "block_idx_last_scheduled_token": SLOTS}, UnsupportedError,
         "block_idx_last_scheduled_token, initial_state_idx is given; expected None"),
        (vllm.selective_scan_fn, PACKED | {"cache_indices": SLOTS[:3]}, ArgumentError, r"state_indices is \[3\]; expected \[sequences\]"),
        (vllm.selective_scan_fn, PACKED | {"ssm_states": None}, ArgumentError, "ssm_states"),
    ],
)  # fmt: skip
def test_what_is_refused(function, call, kind, words):
    kept = PACKED["ssm_states"].clone()
    with pytest.raises(kind, match=words) as caught:
        function(**call)
    assert "selective_scan" in str(caught.value)
    assert torch.equal(PACKED["ssm_states"], kept)
