"""The drop-in signatures of the replay functions, the models' variants of them, and the committed defaults."""

from __future__ import annotations

import inspect
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

import ssmgen
from ssmgen.compat import flashinfer, trtllm
from ssmgen.errors import ArgumentError, UnsupportedError

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
H, P, N, G, T, SLOTS = 4, 8, 32, 2, 3, 5
NEEDED = inspect.Parameter.empty

TRTLLM = {
    **dict.fromkeys(
        (
            "state", "old_x", "old_B", "old_dt", "old_dA_cumsum", "cache_buf_idx", "prev_num_accepted_tokens", "x", "dt", "A", "B", "C",
            "out",
        ),
        NEEDED,
    ),
    "D": None, "z": None, "dt_bias": None, "dt_softplus": False, "state_batch_indices": None, "pad_slot_id": -1, "rand_seed": None,
    "philox_rounds": 10, "launch_with_pdl": False, "use_internal_pdl": True, "_block_size_m": None, "_num_warps": None,
    "_num_stages": None, "_precompute_num_warps": None, "_precompute_num_stages": None, "_heads_per_block": None,
}  # fmt: skip
BEFORE = [{"old_dt": "old_dt_proc", "old_dA_cumsum": "old_cumAdt"}.get(n, n) for n in TRTLLM if n not in ("rand_seed", "philox_rounds")][
    :-1
]
FLASHINFER = {
    **dict.fromkeys(
        (
            "state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens", "x", "dt", "A", "B", "C", "out",
        ),
        NEEDED,
    ),
    "D": None, "z": None, "dt_bias": None, "dt_softplus": False, "state_batch_indices": None, "pad_slot_id": -1, "state_scale": None,
    "rand_seed": None, "philox_rounds": 10, "d_split": None, "cu_seqlens": None, "max_seqlen": None, "enable_pdl": False,
    "cb_scaled": None, "cumAdt_vec": None, "cb_old": None, "precompute_heads_per_cta": 0, "algorithm": "auto",
}  # fmt: skip


SIGNATURES = [(trtllm.replay_selective_state_update, TRTLLM), (flashinfer.checkpointing_ssu, FLASHINFER)]


@pytest.mark.parametrize(("function", "wanted"), SIGNATURES, ids=["trtllm", "flashinfer"])
def test_signature(function, wanted):
    """Positional parameters equal that package's; keyword-only ones do not."""
    parameters = inspect.signature(function).parameters
    theirs = {n: p for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert [(n, p.default) for n, p in theirs.items()] == list(wanted.items())
    assert parameters.keys() - theirs.keys() <= {"zero_padding"}


# Cases. Names are TensorRT-LLM's; with a ring of R entries, FlashInfer's.


def operands(batch: int = 3, ring: int | None = None, state: torch.dtype = F32, x: torch.dtype = F32, T: int = T, seed: int = 0) -> dict:
    """All operands, with garbage in every place of the history that does not count: none does."""
    made = torch.Generator().manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.randn(shape, generator=made).to(dtype)

    call = {"state": randn(SLOTS, H, P, N, dtype=state)}
    if ring is None:
        call |= {"old_x": torch.full((SLOTS, T, H, P), torch.nan, dtype=x), "old_B": torch.full((SLOTS, 2, T, G, N), torch.nan, dtype=x)}
        call |= {name: torch.full((SLOTS, 2, H, T), torch.nan) for name in ("old_dt", "old_dA_cumsum")}
        call |= {"cache_buf_idx": torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32)}
    else:
        call |= {"x_cache": torch.full((SLOTS, H, ring, P), torch.nan, dtype=x)}
        call |= {"B_cache": torch.full((SLOTS, G, ring, N), torch.nan, dtype=x), "dt_cache": torch.full((SLOTS, H, ring), torch.nan)}
        call |= {"ring_start": torch.tensor([0, 4, 2, 1, 3], dtype=torch.int32)}
    call |= {"prev_num_accepted_tokens": torch.zeros(SLOTS, dtype=torch.int32), **tokens(batch, T, x, seed + 1)}
    A, bias = -torch.rand(H, generator=made) - 0.1, randn(H)
    call |= {"A": A[:, None, None].expand(H, P, N), "D": randn(H, P), "dt_bias": bias[:, None].expand(H, P), "dt_softplus": True}
    return call | {"state_batch_indices": torch.randperm(SLOTS, generator=made)[:batch].int()}


def tokens(batch: int, T: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = {"x": (H, P), "B": (G, N), "C": (G, N), "z": (H, P)}
    new = {n: torch.randn(batch, T, *shape, generator=made).to(dtype) for n, shape in shapes.items()}
    dt = torch.randn(batch, T, H, generator=made).to(dtype)
    return new | {"dt": dt[..., None].expand(batch, T, H, P), "out": torch.full((batch, T, H, P), torch.nan, dtype=dtype)}


def copied(call: dict) -> dict:
    """The same call in separate memory; expanded tensors stay expanded."""
    return {n: t.clone() if isinstance(t, Tensor) and 0 not in t.stride() else t for n, t in call.items()}


def sequential(S: Tensor, call: dict, row: int, count: int) -> tuple[Tensor, Tensor]:
    """(state after `count` of a row's tokens, outputs of all of them) in float64, a token at a time."""
    S, kept, outputs = S.double(), S.double(), []
    for t in range(call["x"].shape[1]):
        x, B, C, z = (call[n][row, t].double() for n in ("x", "B", "C", "z"))
        dt = softplus(call["dt"][row, t, :, 0].double() + call["dt_bias"][:, 0].double())
        B, C = B.repeat_interleave(H // G, 0)[:, None], C.repeat_interleave(H // G, 0)[:, None]
        S = S * (dt * call["A"][:, 0, 0].double()).exp()[:, None, None] + B * (dt[:, None] * x)[..., None]
        outputs.append(((S * C).sum(-1) + call["D"].double() * x) * silu(z))
        kept = S if t + 1 == count else kept
    return kept, torch.stack(outputs)


def native(call: dict, **more) -> Tensor:
    """ssmgen's own function on TensorRT-LLM's or FlashInfer's names."""
    call = call | more
    call["state_indices"] = call.pop("state_batch_indices", None)
    if "x_cache" not in call:
        return ssmgen.replay_selective_state_update(**call)
    call |= {"old_x": call.pop("x_cache").transpose(1, 2), "old_B": call.pop("B_cache").transpose(1, 2), "old_dt": call.pop("dt_cache")}
    return ssmgen.checkpoint_selective_state_update(**call)


def same(a: dict, b: dict) -> bool:
    """Every tensor of both, bit for bit."""
    return all(torch.equal(a[n].nan_to_num(7.5), b[n].nan_to_num(7.5)) for n in a if isinstance(a[n], Tensor))


RING = 8  # a window of 5


@pytest.mark.parametrize("kind", ["trtllm", "flashinfer"])
def test_steps_equal_the_recurrence(kind):
    """Twenty steps on any number of accepted tokens, with the bookkeeping that those packages require of the caller."""
    step = trtllm.replay_selective_state_update if kind == "trtllm" else flashinfer.checkpointing_ssu
    call = operands(ring=None if kind == "trtllm" else RING)
    pick, slots = random.Random(0), call["state_batch_indices"].tolist()
    states = {slot: call["state"][slot].double() for slot in slots}
    untouched = call["state"].clone()
    for i in range(20):
        call |= tokens(3, T, F32, seed=100 + i)
        step(**call)
        for row, slot in enumerate(slots):
            count, before = pick.randint(0, T), call["prev_num_accepted_tokens"]
            states[slot], want = sequential(states[slot], call, row, count)
            assert torch.allclose(call["out"][row].double(), want, rtol=1e-5, atol=1e-5), (i, slot)
            if kind == "trtllm":
                call["cache_buf_idx"][slot] ^= 1
                before[slot] = count
            elif before[slot] + 2 * T > RING:
                call["ring_start"][slot] = (call["ring_start"][slot] + before[slot]) % RING
                before[slot] = count
            else:
                before[slot] += count
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(call["state"][others], untouched[others])


# TensorRT-LLM.


def started(**how) -> dict:
    """After a step of which two tokens were accepted."""
    call = operands(**how)
    trtllm.replay_selective_state_update(**call)
    call["cache_buf_idx"] ^= 1
    call["prev_num_accepted_tokens"] += 2
    return call | tokens(call["x"].shape[0], call["x"].shape[1], call["x"].dtype, seed=50)


@pytest.mark.parametrize("x", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("state", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
def test_trtllm_is_the_direct_call(state, x):
    call = started(state=state, x=x)
    for rounding in ({}, {"rand_seed": torch.tensor([77]), "philox_rounds": 7} if state != F32 else {}):
        ours, theirs = copied(call), copied(call)
        native(ours, **rounding)
        assert trtllm.replay_selective_state_update(**theirs, **rounding, launch_with_pdl=True, use_internal_pdl=False) is None
        assert same(ours, theirs) and not ours["out"].isnan().any()


@pytest.mark.parametrize("names", [list(TRTLLM), BEFORE], ids=["merged", "before"])
def test_trtllm_by_position_and_by_name(names):
    """Both generations: all arguments by position, none, and every number in between."""
    base = started()
    want = copied(base)
    native(want)
    values = base | {"pad_slot_id": -1, "rand_seed": None, "philox_rounds": 10, "launch_with_pdl": False, "use_internal_pdl": True}
    values |= {"old_dt_proc": base["old_dt"], "old_cumAdt": base["old_dA_cumsum"], **{n: 4 for n in names if n.startswith("_")}}
    for n in range(len(names) + 1):
        given = copied(values)
        args, kwargs = [given[name] for name in names[:n]], {name: given[name] for name in names[n:]}
        trtllm.incremental_selective_state_update(*args, **kwargs)
        assert same({k: want[k] for k in ("state", "out", "old_x", "old_B")}, given), n


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("names", [list(TRTLLM), BEFORE], ids=["merged", "before"])
def test_trtllm_flags_keep_their_meaning(names, flag, monkeypatch):
    seen = {}
    monkeypatch.setattr(trtllm, "_native", lambda *args, **kwargs: seen.update(kwargs))
    given = TRTLLM | operands()
    call = {n: given[trtllm.RENAMED.get(n, n)] for n in names}
    call |= {"launch_with_pdl": flag, "use_internal_pdl": not flag, "pad_slot_id": 9}
    for args, kwargs in ((), call), (tuple(call.values()), {}):
        seen.clear()
        trtllm.replay_selective_state_update(*args, **kwargs)
        assert (seen["pdl"], seen["after_conv"], seen["internal_pdl"]) == (None if flag else False, flag, not flag)
        assert seen["pad_slot_id"] == 9 and "precision" not in seen


def test_trtllm_pads_with_zeros():
    call = started()
    call["state_batch_indices"] = torch.tensor([2, 4, 77], dtype=torch.int32)
    before, pad = copied(call), [0, 1, 3, 4]
    trtllm.replay_selective_state_update(**call, pad_slot_id=4)
    assert not call["out"][1:].any() and call["out"][0].any()
    for name in ("state", "old_x", "old_B", "old_dt"):
        assert torch.equal(call[name][pad].nan_to_num(7), before[name][pad].nan_to_num(7)), name


def test_trtllm_axes_may_be_left_out():
    """One token, and one head."""
    call = operands(T=1)
    short = copied(call) | {n: t.squeeze(1) for n, t in copied(call).items() if n in ("x", "dt", "B", "C", "z")}
    short["out"] = torch.full((3, H, P), torch.nan)
    native(call)
    trtllm.replay_selective_state_update(**short)
    assert torch.equal(short["out"], call["out"].squeeze(1)) and same(call, short | {n: call[n] for n in ("x", "dt", "B", "C", "z", "out")})
    state = torch.randn(2, P, N)
    one = {"old_x": torch.zeros(2, 1, 1, P), "old_B": torch.zeros(2, 2, 1, 1, N), "prev_num_accepted_tokens": torch.zeros(2).int()}
    one |= {n: torch.zeros(2, 2, 1, 1) for n in ("old_dt", "old_dA_cumsum")} | {"cache_buf_idx": torch.zeros(2).int()}
    one |= {"x": torch.randn(2, P), "dt": torch.rand(2, 1).expand(2, P), "A": torch.tensor(-0.5).expand(P, N), "B": torch.randn(2, N)}
    one |= {"C": torch.randn(2, N), "D": torch.randn(P), "out": torch.empty(2, P)}
    trtllm.replay_selective_state_update(state, **one)
    after = state * (one["dt"][:, :1, None] * -0.5).exp() + (one["dt"] * one["x"])[..., None] * one["B"][:, None]
    assert torch.allclose(one["out"], (after * one["C"][:, None]).sum(-1) + one["D"] * one["x"], atol=1e-5)


@pytest.mark.parametrize(
    ("error", "change", "words"),
    [
        (UnsupportedError, {"intermediate_update_inputs": torch.zeros(5, 3, 100)}, "is given, with x, dt and B in one tensor"),
        (UnsupportedError, {"n_writes": 2}, "n_writes.*checkpoint_selective_state_update"),
        (UnsupportedError, {"state_scales": torch.ones(5, H, P), "mode": "persistent_main"}, "state_scales, mode"),
        (UnsupportedError, {"old_x": torch.zeros(SLOTS, 2, T, H, P)}, "two buffers.*checkpoint_selective_state_update"),
        (UnsupportedError, {"old_x": torch.zeros(SLOTS, 7, H, P)}, "tokens and the history room for"),
        (ArgumentError, {"old_dt_proc": torch.zeros(SLOTS, 2, H, T)}, "old_dt_proc and old_dt are both given; expected one"),
        (ArgumentError, {"dt": torch.zeros(3, T, H, P)}, r"dt is \[3, 3, 4, 8\] with strides \[96, 32, 8, 1\]"),
        (ArgumentError, {"A": torch.zeros(H, P, N)}, "A is .*one value per head"),
        (ArgumentError, {"rand_seed": torch.tensor([1])}, "rand_seed is given with a float32 state, which is not rounded; expected None"),
        (ArgumentError, {"cache_buf_idx": torch.zeros(SLOTS).long()}, "cache_buf_idx is int64; expected int32"),
        (ArgumentError, {"out": None}, "out is None"),
        (ArgumentError, {"x": [1.0]}, "x is a list; expected a tensor"),
        (TypeError, {"heads_per_block": 1}, "heads_per_block"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else None,
)
def test_trtllm_errors(error, change, words):
    call = operands() | change
    before = copied(call)
    with pytest.raises(error, match=words):
        trtllm.replay_selective_state_update(**call)
    assert same(before, call)


def test_trtllm_absent_options_of_the_next_generation_are_no_error():
    call, want = started(), None
    want = copied(call)
    native(want)
    trtllm.replay_selective_state_update(**call, state_scales=None, mode=None)
    assert same(want, call)


# FlashInfer.


def ringed(**how) -> dict:
    """After two steps: the first slot of the batch has one accepted token, which leaves room, the others four, which does not."""
    call = operands(ring=RING, **how)
    slots = call["state_batch_indices"].long()
    for i, count in enumerate(([0, 2, 2], [1, 2, 2])):
        flashinfer.checkpointing_ssu(**call)
        call["prev_num_accepted_tokens"][slots] += torch.tensor(count, dtype=torch.int32)
        call |= tokens(call["x"].shape[0], call["x"].shape[1], call["x"].dtype, seed=50 + i)
    return call


@pytest.mark.parametrize("x", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("state", [F32, F16, BF16], ids=["f32", "f16", "bf16"])
def test_flashinfer_is_the_direct_call(state, x):
    call = ringed(state=state, x=x)
    first, later = call["state_batch_indices"][0].item(), call["state_batch_indices"][1:].long()
    for rounding in ({}, {"rand_seed": torch.tensor(77), "philox_rounds": 7} if state != F32 else {}):
        ours, theirs = copied(call), copied(call)
        native(ours, **{n: t.reshape(1) if n == "rand_seed" else t for n, t in rounding.items()})
        assert flashinfer.checkpointing_ssu(**theirs, **rounding, enable_pdl=True) is theirs["out"]
        assert same(ours, theirs) and not ours["out"].isnan().any()
        assert torch.equal(theirs["state"][first], call["state"][first]) and not torch.equal(theirs["state"][later], call["state"][later])


def test_flashinfer_by_position():
    values = ringed() | {"pad_slot_id": -1, "state_scale": None, "rand_seed": None, "philox_rounds": 10, "d_split": 2, "cu_seqlens": None}
    values |= {"max_seqlen": None, "enable_pdl": False, "cb_scaled": torch.zeros(1), "cumAdt_vec": torch.zeros(1), "cb_old": torch.zeros(1)}
    values |= {"precompute_heads_per_cta": 4, "algorithm": "two-kernel"}
    want = copied(values)
    native({n: want[n] for n in ringed()})
    for n in (12, 20, len(FLASHINFER)):
        given = copied(values)
        names = list(FLASHINFER)
        flashinfer.checkpointing_ssu(*[given[name] for name in names[:n]], **{name: given[name] for name in names[n:]})
        assert same(want, given), n


def test_flashinfer_packed():
    """Sequences of 2, 0 and 3 tokens, each equal to a separate call."""
    call, lengths = ringed(), [2, 0, 3]
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    packed = copied(call)
    for name in ("x", "dt", "B", "C", "z", "out"):
        packed[name] = torch.cat([call[name][i : i + 1, :n] for i, n in enumerate(lengths)], 1)
    packed["dt"] = packed["dt"][..., :1].expand(1, 5, H, P)
    out = flashinfer.checkpointing_ssu(**packed, cu_seqlens=starts, max_seqlen=T)
    assert out is packed["out"] and out.shape == (1, 5, H, P)
    for i, (begin, end) in enumerate(pairwise(starts.tolist())):
        one = copied(call) | {n: call[n][i : i + 1, : end - begin] for n in ("x", "dt", "B", "C", "z")}
        one |= {"state_batch_indices": call["state_batch_indices"][i : i + 1], "out": torch.zeros(1, end - begin, H, P)}
        slot = one["state_batch_indices"].item()
        if end > begin:
            native(one, max_tokens=T)
        assert torch.equal(out[:, begin:end], one["out"]) and torch.equal(packed["state"][slot], one["state"][slot])


@pytest.mark.parametrize("enable_pdl", [False, True])
def test_flashinfer_pdl(enable_pdl, monkeypatch):
    from ssmgen.compat.flashinfer import replay as flashinfer_replay

    seen = {}
    monkeypatch.setattr(flashinfer_replay, "_native", lambda *args, **kwargs: seen.update(kwargs))
    flashinfer.checkpointing_ssu(**operands(ring=RING), enable_pdl=enable_pdl)
    assert seen["pdl"] is (None if enable_pdl else False) and not {"after_conv", "precision", "two_kernels"} & seen.keys()


@pytest.mark.parametrize(
    ("error", "change", "words"),
    [
        (ArgumentError, {"state_scale": torch.ones(SLOTS, H, P)}, "; expected int16, int8 or float8_e4m3fn. Leave out state_scale"),
        (
            ArgumentError,
            {"state": torch.zeros(SLOTS, H, P, N, dtype=torch.int8)},
            "state is int8 and state_scale is None; expected a float32 scale for each row",
        ),
        (ArgumentError, {"out": None}, "out is None"),
        (ArgumentError, {"algorithm": "best"}, "algorithm is 'best'"),
        (ArgumentError, {"max_seqlen": 3}, "is None; expected both or neither"),
        (ArgumentError, {"cu_seqlens": torch.tensor([0, 3, 6, 9])}, "is None; expected both or neither"),
        (ArgumentError, {"cu_seqlens": torch.tensor([0, 3, 6, 9]), "max_seqlen": 3}, "x is .*the first of size 1"),
        (ArgumentError, {"x_cache": torch.zeros(SLOTS, H, RING)}, "old_x is"),
        (ArgumentError, {"x_cache": torch.zeros(SLOTS, H, T, P)}, "or more, to leave a window"),
        (ArgumentError, {"ring_start": torch.zeros(SLOTS).long()}, "ring_start is int64; expected int32"),
        (TypeError, {"old_x": torch.zeros(1)}, "old_x"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else None,
)
def test_flashinfer_errors(error, change, words):
    call = operands(ring=RING) | change
    before = copied(call)
    with pytest.raises(error, match=words):
        flashinfer.checkpointing_ssu(**call)
    assert same(before, call)
