"""Drop-ins for Mamba-1's prompts against token-by-token float64: mamba-ssm's, vLLM's and SGLang's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from engine_calls import no_call_goes_to_the_engine, pages, sglang_functions, vllm_functions  # noqa: F401
from engine_stand_ins import found as place_of
from prompt_oracles import BF16, F32, close, randn, starts_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import silu, softplus

from ssmgen.compat import mamba1_prompts, mamba_ssm, sglang_mamba, vllm
from ssmgen.errors import ArgumentError, UnsupportedError

D, N = 12, 5
LENGTHS = (17, 0, 1, 40, 6)
TOKENS = sum(LENGTHS)
SLOTS = torch.tensor([5, 1, 3, 7, 2], dtype=torch.int32)


def by_tokens(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    """[…, D, T] as behind a projection: the channels of a token lie behind each other."""
    return randn(*shape[:-2], shape[-1], shape[-2], seed=seed, dtype=dtype).transpose(-1, -2)


def operands(*lead: int, T: int, G: int | None = None, make=by_tokens, dtype: torch.dtype = BF16, **more) -> dict:
    """Rows [*lead, D, T]; a G of None is an axis that is not there."""
    groups = () if G is None else (G,)
    call = {n: make(*lead, D, T, seed=seed, dtype=dtype) for seed, n in enumerate(("u", "delta", "z"))}
    call |= {n: make(*lead, *groups, N, T, seed=seed, dtype=dtype) for seed, n in enumerate(("B", "C"), 3)}
    call |= {"A": -randn(D, N, seed=5, dtype=F32).exp(), "D": randn(D, seed=6, dtype=F32), "delta_bias": randn(D, seed=7, dtype=F32)}
    return call | {"delta_softplus": True} | more


def walk(call: dict, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One row [D, T] token by token: (y [D, T], the state after it [D, N]), in float64."""
    u, delta, A, B, C = (call[n].double() for n in ("u", "delta", "A", "B", "C"))
    B, C = (t[None] if t.dim() == 2 else t for t in (B, C))
    B, C = (t.repeat_interleave(D // t.shape[0], 0) for t in (B, C))
    bias, skip, z = (call.get(n) for n in ("delta_bias", "D", "z"))
    d = delta if bias is None else delta + bias.double()[:, None]
    d = softplus(d) if call["delta_softplus"] else d
    h, y = torch.zeros(D, N, dtype=torch.float64) if state is None else state.double(), torch.empty_like(u)
    for t in range(u.shape[1]):
        h = torch.exp(d[:, t, None] * A) * h + (d[:, t] * u[:, t])[:, None] * B[..., t]
        y[:, t] = (h * C[..., t]).sum(-1)
    y = y if skip is None else y + skip.double()[:, None] * u
    return y if z is None else y * silu(z.double()), h


def part(call: dict, *, row: int | None = None, span: slice = slice(None)) -> dict:
    """A row of a batch, or some tokens of packed ones."""
    per_token = ("u", "delta", "z", "B", "C")
    return {n: (t if row is None else t[row])[..., span] if n in per_token and t is not None else t for n, t in call.items()}


def sequences(call: dict, lengths=LENGTHS) -> list[dict]:
    starts = starts_of(lengths).tolist()
    return [part(call, span=slice(a, b)) for a, b in pairwise(starts)]


def by_channels(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return randn(*shape, seed=seed, dtype=dtype)


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
    """As a product leaves delta, where a projection left u."""
    call, other = operands(2, T=23, make=make), by_channels if make is by_tokens else by_tokens
    turned = torch.empty_like(other(*call[name].shape, seed=0)).copy_(call[name])
    assert turned.stride() != call[name].stride()
    assert torch.equal(mamba_ssm.selective_scan_fn(**call | {name: turned}), mamba_ssm.selective_scan_fn(**call))


def test_one_order_goes_to_the_kernel(monkeypatch):
    """What lies otherwise than u is copied; B and C, and what lies like u, are not."""
    call = operands(2, T=23)
    given = call | {"delta": call["delta"].contiguous()}
    monkeypatch.setattr(mamba_ssm._mamba1.scan, "__defaults__", (lambda *args, **more: args,))
    u, delta, _, B, C, _, z, _ = mamba_ssm.selective_scan_fn(**given)
    assert delta.stride() == u.stride() and torch.equal(delta, call["delta"])
    assert all(a is b for a, b in ((u, call["u"]), (z, call["z"]), (B, call["B"]), (C, call["C"])))


# vLLM: as its layers hold it.


def vllm_call(lengths=LENGTHS, **more) -> dict:
    tokens = sum(lengths)
    call = operands(T=tokens, G=None) | {"ssm_states": pages(9, D, N), "query_start_loc": starts_of(lengths), "cache_indices": SLOTS}
    return call | {"cu_chunk_seqlen": SLOTS, "last_chunk_indices": SLOTS} | more


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
    """Without starts each row is a sequence, and without indices its number is its slot; nothing of what is given is overwritten."""
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


def test_nothing_of_a_tensor_is_read_by_the_host():
    """A fake tensor holds no values: who asks for one gets an error."""
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
        (mamba_ssm.selective_scan_fn, ROWS | {"A": COMPLEX}, UnsupportedError, "A is complex: ssmgen's states are real"),
        (mamba_ssm.selective_scan_fn, ROWS | CONSTANT, UnsupportedError, r"(?s)B is \[D, N\].*C is \[D, N\], the same"),
        (mamba_ssm.selective_scan_fn, ROWS | {"u": ROWS["u"].detach().requires_grad_()}, ArgumentError, "u requires grad"),
        (mamba_ssm.selective_scan_fn, ROWS | {"u": ROWS["u"][0]}, ArgumentError, r"u is \[12, 9\], not \[batch, D, T\]"),
        (mamba_ssm.selective_scan_fn, ROWS | {"return_last_state": SLOTS}, ArgumentError, "return_last_state is a Tensor"),
        (vllm.selective_scan_fn, PACKED | {"initial_state_idx": SLOTS, "block_idx_last_scheduled_token": SLOTS}, UnsupportedError,
         "block_idx_last_scheduled_token, initial_state_idx: a sequence has one slot"),
        (vllm.selective_scan_fn, PACKED | {"cache_indices": SLOTS[:3]}, ArgumentError, r"state_indices is \[3\], not \[sequences\]"),
        (vllm.selective_scan_fn, PACKED | {"ssm_states": None}, ArgumentError, "ssm_states"),
    ],
)  # fmt: skip
def test_what_is_refused(function, call, kind, words):
    kept = PACKED["ssm_states"].clone()
    with pytest.raises(kind, match=words) as caught:
        function(**call)
    assert "selective_scan" in str(caught.value)
    assert torch.equal(PACKED["ssm_states"], kept)
    assert mamba1_prompts.selective_scan is mamba1_prompts.scan.__defaults__[0]
