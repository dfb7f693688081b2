"""FlashInfer's selective_state_update, against the recurrence as a loop in float64."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ssmgen.compat.flashinfer import selective_state_update as flashinfer
from ssmgen.errors import ArgumentError, UnsupportedError

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
B, T, H, P, N, G, SLOTS = 4, 3, 4, 8, 16, 2, 20
READ = torch.tensor([3, 1, 0, 6], dtype=torch.int32)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def operands(*lead: int) -> dict[str, Tensor]:
    """Operands as models pass them: A, dt, D and dt_bias are expanded."""
    return {
        "x": randn(*lead, H, P), "dt": randn(*lead, H, seed=1)[..., None].expand(*lead, H, P),
        "A": -randn(H, seed=2).abs()[:, None, None].expand(H, P, N), "B": randn(*lead, G, N, seed=3), "C": randn(*lead, G, N, seed=4),
        "D": randn(H, seed=5)[:, None].expand(H, P), "z": randn(*lead, H, P, seed=6), "dt_bias": randn(H, seed=7)[:, None].expand(H, P),
    }  # fmt: skip


def states(n: int = SLOTS, dtype: torch.dtype = F32) -> Tensor:
    return randn(n, H, P, N, seed=9).to(dtype)


def token(S: Tensor, x: dict[str, Tensor], *at: int) -> tuple[Tensor, Tensor]:
    """(new state, output) after one token of one sequence, in float64."""
    of = {n: t.double() if n in ("A", "D", "dt_bias") else t[at].double() for n, t in x.items()}
    b, c = (of[n].repeat_interleave(H // G, 0)[:, None] for n in "BC")
    dt = torch.log1p((of["dt"] + of["dt_bias"]).exp())
    S = S * (dt[..., None] * of["A"]).exp() + (dt * of["x"])[..., None] * b
    return S, ((S * c).sum(-1) + of["D"] * of["x"]) * of["z"] * of["z"].sigmoid()


def expected(x: dict[str, Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs, states after each token) of dense operands."""
    out, each = [], []
    for b in range(x["x"].shape[0]):
        S = start[b].double()
        for t in range(x["x"].shape[1]):
            S, y = token(S, x, b, t)
            out.append(y)
            each.append(S)
    lead = x["x"].shape[:2]
    return torch.stack(out).view(*lead, H, P), torch.stack(each).view(*lead, H, P, N)


def close(a: Tensor, b: Tensor) -> bool:
    tolerance = {F32: 1e-5, F16: 2e-3, BF16: 2e-2}[a.dtype]
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def call(state: Tensor, x: dict[str, Tensor], **more) -> Tensor:
    more = {"z": x["z"], "dt_bias": x["dt_bias"], "dt_softplus": True} | more
    return flashinfer(state, x["x"], x["dt"], x["A"], x["B"], x["C"], x["D"], **more)


def test_signature_is_that_package_s():
    names = (
        "state x dt A B C D z dt_bias dt_softplus state_batch_indices pad_slot_id state_scale out disable_state_update "
        "intermediate_states_buffer intermediate_state_indices intermediate_state_scales rand_seed philox_rounds cache_steps algorithm "
        "dst_state_batch_indices cu_seqlens num_accepted_tokens backend retrieve_parent_token"
    )
    parameters = dict(inspect.signature(flashinfer).parameters)
    assert parameters.pop("zero_padding").kind is inspect.Parameter.KEYWORD_ONLY  # not that package's
    assert list(parameters) == names.split()
    defaults = {n: p.default for n, p in parameters.items() if p.default not in (inspect.Parameter.empty, None)}
    assert defaults == {
        "dt_softplus": False, "pad_slot_id": -1, "disable_state_update": False, "philox_rounds": 10, "cache_steps": 0,
        "algorithm": "auto", "backend": "auto",
    }  # fmt: skip


@pytest.mark.parametrize("columns", [None, 1, 3])
def test_one_token(columns):
    """The first column of a table of slots is read."""
    state, x = states(), operands(B)
    before = state.clone()
    read = READ if columns is None else torch.cat([READ[:, None], torch.full((B, columns - 1), 17, dtype=torch.int32)], 1)
    dst = None if columns is None else READ[:, None].long() + 8
    out = call(state, x, state_batch_indices=read, dst_state_batch_indices=dst, algorithm="vertical", backend="flashinfer")
    lead = {n: t[:, None] if n not in ("A", "D", "dt_bias") else t for n, t in x.items()}
    want, each = expected(lead, before[READ.long()])
    target = READ.long() + (0 if columns is None else 8)
    assert out.shape == (B, H, P) and close(out, want[:, 0]) and close(state[target], each[:, 0])
    state[target] = before[target]
    assert torch.equal(state, before), "another slot was written"


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("disable", [False, True])
def test_several_tokens_with_intermediate_states(dtype, disable):
    state, x = states(dtype=dtype), operands(B, T)
    before, kept = state.clone(), torch.zeros(9, T + 1, H, P, N, dtype=dtype)
    rows = torch.tensor([7, 2, -1, 0])
    out = torch.empty(B, T, H, P)
    got = call(
        state, x, state_batch_indices=READ, intermediate_states_buffer=kept, intermediate_state_indices=rows, cache_steps=T, out=out,
        disable_state_update=disable,
    )  # fmt: skip
    want, each = expected(x, before[READ.long()])
    assert got is out and close(out, want) and close(kept[[7, 2, 0], :T], each[[0, 1, 3]])
    assert not kept[:, T].any() and not kept[[1, 3, 4, 5, 6, 8]].any()
    assert torch.equal(state, before) if disable else close(state[READ.long()], each[:, -1])


def test_a_slot_per_token_and_accepted_counts():
    """vLLM's call: packed, from the accepted token's column to a column per token. Zero accepted tokens are like one."""
    lengths, accepted = [3, 1, 0, 2], torch.tensor([2, 0, 1, 3])
    table = torch.arange(B * T, dtype=torch.int32).view(B, T)
    x, state = operands(sum(lengths)), states()
    before, edges = state.clone(), torch.tensor([0, *lengths]).cumsum(0).int()
    out = call(
        state, x, state_batch_indices=table, dst_state_batch_indices=table, num_accepted_tokens=accepted, cu_seqlens=edges, cache_steps=T,
        pad_slot_id=19,
    )  # fmt: skip
    want = before.double()
    for b, (start, stop) in enumerate(pairwise(edges.tolist())):
        S = before[table[b, max(int(accepted[b]) - 1, 0)]].double()
        for t in range(start, stop):
            S, y = token(S, x, t)
            want[table[b, t - start]] = S
            assert close(out[t], y)
    assert close(state, want)


def test_a_tree():
    """Whose states are kept by slot, as FlashInfer does it where no rows are given."""
    state, x, kept = states(), operands(B, 4), torch.zeros(SLOTS, 4, H, P, N)
    before, parents = state.clone(), torch.tensor([[-1, 0, 0, 1], [0, 0, 1, 2], [0, 3, -1, 9], [-1, -1, 0, 0]])
    out = call(
        state, x, state_batch_indices=READ, intermediate_states_buffer=kept, retrieve_parent_token=parents, cache_steps=4,
        disable_state_update=True,
    )  # fmt: skip
    for b in range(B):
        S, each = before[READ[b]].double(), []
        for t in range(4):
            S, y = token(each[parents[b, t]] if 0 <= parents[b, t] < t else S, x, b, t)
            each.append(S)
            assert close(out[b, t], y) and close(kept[READ[b], t], S)
    assert torch.equal(state, before) and not kept[[s for s in range(SLOTS) if s not in READ.tolist()]].any()


def test_padding_is_zero_and_noise_stays_within_a_place():
    state, x = states(dtype=F16), operands(B)
    before, slots = state.clone(), torch.tensor([3, 7, -4, 6])
    out = call(state, x, state_batch_indices=slots, pad_slot_id=7, rand_seed=torch.tensor(42), philox_rounds=4)
    lead = {n: t[:, None] if n not in ("A", "D", "dt_bias") else t for n, t in x.items()}
    want, each = expected(lead, before[slots])
    assert not out[1:3].any() and close(out[[0, 3]], want[[0, 3], 0]) and close(state[[3, 6]], each[[0, 3], 0])
    assert not torch.equal(state[3], each[0, 0].half())  # which is to nearest
    state[[3, 6]] = before[[3, 6]]
    assert torch.equal(state, before)


@pytest.mark.parametrize(
    ("error", "change", "words"),
    [
        (ArgumentError, {"state_scale": torch.zeros(SLOTS, H, P)}, "state_scale is given and state is float32; "
            "expected int16, int8 or float8_e4m3fn"),
        (ArgumentError, {"intermediate_state_scales": torch.zeros(B, T, H, P)}, "intermediate_state_scales is given without"),
        (UnsupportedError, {"backend": "cake"}, "backend is 'cake'; expected 'auto' "
            "or 'flashinfer'"), (ArgumentError, {"algorithm": "fast"}, "algorithm is 'fast'"),
        (ArgumentError, {"cache_steps": 2}, "cache_steps is 2; expected 3, the tokens of x"),
        (ArgumentError, {"rand_seed": torch.zeros(2, dtype=torch.int64)}, "rand_seed has 2 elements"),
        (ArgumentError, {"rand_seed": torch.zeros(1, dtype=torch.int64), "philox_rounds": 0}, "philox_rounds is 0"),
        (ArgumentError, {"rand_seed": torch.zeros(1, dtype=torch.int64)}, "rand_seed is given and no written state is rounded"),
        (ArgumentError, {"dst_state_batch_indices": READ, "disable_state_update": True}, "dst_state_indices is given with "
            "update_state=False, which writes no state"),
        (ArgumentError, {"retrieve_parent_token": torch.zeros(B, T, dtype=torch.int32)}, "without intermediate_states"),
    ],
)  # fmt: skip
def test_says_why_not(error, change, words):
    state = states()
    before = state.clone()
    with pytest.raises(error, match=words):
        call(state, operands(B, T), state_batch_indices=READ, **change)
    assert torch.equal(state, before)


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.float8_e4m3fn])
def test_states_with_scales(dtype, axes):
    """A row's scale, written in place, makes its greatest element the largest number of the type."""
    largest = {torch.int16: 32767, torch.int8: 127, torch.float8_e4m3fn: 448}[dtype]
    state, scale, x = (states() * 20).to(dtype), torch.rand(SLOTS, H, P) + 0.1, operands(B, T)
    start = state.double() * scale.double()[..., None]
    kept, kept_scales = torch.zeros(SLOTS, T, H, P, N, dtype=dtype), torch.zeros(SLOTS, T, H, P)
    given = scale if axes == 3 else scale[..., None]
    out = call(
        state, x, state_batch_indices=READ, state_scale=given, intermediate_states_buffer=kept, intermediate_state_scales=kept_scales,
        cache_steps=T,
    )  # fmt: skip
    want, each = expected(x, start[READ.long()])
    assert torch.allclose(out.double(), want, rtol=1e-4, atol=1e-3)
    slots = READ.long()
    for stored, scales, near in ((state[slots], scale[slots], each[:, -1]), (kept[slots], kept_scales[slots], each)):
        most = near.abs().amax(-1, keepdim=True)
        assert torch.allclose(scales.double(), most[..., 0] / largest, rtol=1e-4)
        step = near.abs() / 8 + most / 448 / 64 if dtype == torch.float8_e4m3fn else most / largest
        assert ((stored.double() * scales.double()[..., None] - near).abs() <= 0.51 * step + 1e-5 * most).all()
