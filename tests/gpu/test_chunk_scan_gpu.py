"""chunk_scan on a card: the laws of its results at the sizes of models, offsets beyond 32 bits, and the same bits every time."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial

import pytest
import scan_cases as laws
import torch
from bits import bits
from scan_cases import BF16, F16, F32, Sizes, make, same

import ssmgen

pytestmark = pytest.mark.gpu

MODEL = Sizes(heads=16, groups=2, headdim=64, d_state=128, device="cuda")
WIDE = replace(MODEL, heads=128, groups=8)
# Warpgroups may serve a call, or each warp alone: laws of bits hold within one of the two forms. In the second form, blocks that divide a
# sequence change no bit.
BY_WARPS = partial(laws.launched, spec=laws.by_warps)
DIVIDED = partial(laws.launched, spec=partial(laws.by_warps, heads=1))
by_both = pytest.mark.parametrize("scan", [ssmgen.chunk_scan, BY_WARPS, DIVIDED], ids=["served", "warps", "divided"])


@by_both
@pytest.mark.parametrize(
    ("sizes", "tokens", "decay", "more"),
    [
        (WIDE, 2048, 1.0, {}),
        (MODEL, 2048, 1e-3, {}),
        (MODEL, 2048, 16.0, {"step": 3.0}),
        (replace(MODEL, x=F16), 640, 0.1, {"z": True}),
        (replace(MODEL, headdim=128), 640, 0.1, {"z": True}),
        (replace(MODEL, d_state=256), 640, 0.1, {}),
        (replace(MODEL, headdim=80, d_state=16), 640, 0.1, {}),
        (replace(MODEL, x=F32), 2048, 1.0, {"z": True}),
        (replace(MODEL, x=F32), 4096, 1e-3, {}),
        (replace(MODEL, x=F32, heads=4), 640, 16.0, {"step": 3.0}),
        (replace(MODEL, x=F32, heads=4, d_state=256), 640, 0.1, {}),
    ],
    ids=[
        "wide",
        "long-memory",
        "strong-decay",
        "f16-gate",
        "p128",
        "n256",
        "p80",
        "f32",
        "f32-long-memory",
        "f32-strong-decay",
        "f32-n256",
    ],
)
def test_results_are_those_of_float64(scan, sizes, tokens, decay, more):
    laws.is_accurate(scan, sizes, tokens, decay, **more)


@by_both
def test_packing_changes_no_bit(scan):
    laws.packing_changes_no_bit(scan, MODEL, (*laws.LENGTHS, 1000, 2048))


@by_both
@pytest.mark.parametrize(("cut", "sizes"), [(64, WIDE), (1024, WIDE), (1984, WIDE), (1024, replace(MODEL, x=F32))])
def test_a_cut_changes_no_bit(scan, cut, sizes):
    """Enough heads that no sequence is divided among blocks."""
    laws.a_cut_changes_no_bit(scan, sizes, 2048, cut)


@by_both
@pytest.mark.parametrize("state", [F32, BF16])
def test_a_pool_is_touched_where_it_should_be(scan, state):
    laws.a_pool_is_touched_where_it_should_be(scan, MODEL, state)


@pytest.mark.parametrize(("sizes", "state", "index"), [(MODEL, F32, torch.int32), (MODEL, BF16, torch.int64), (WIDE, F32, None)])
def test_states_of_a_pool_may_begin_elsewhere(sizes, state, index):
    laws.states_of_a_pool_may_begin_elsewhere(ssmgen.chunk_scan, sizes, state, index)


@pytest.mark.parametrize(
    ("scan", "offset", "x"),
    [(ssmgen.chunk_scan, 8, BF16), *((BY_WARPS, offset, x) for offset, x in ((8, BF16), (4, BF16), (2, BF16), (1, F32)))],
)
def test_layout_changes_no_bit(scan, offset, x):
    laws.layout_changes_no_bit(scan, replace(MODEL, x=x), offset)


@by_both
def test_decoding_goes_on(scan):
    laws.decoding_goes_on(scan, MODEL, 500)


def test_ids_are_sequences():
    laws.ids_are_sequences(BY_WARPS, MODEL, (*laws.LENGTHS, 1000))


def test_ids_go_on():
    laws.ids_go_on(ssmgen.chunk_scan, MODEL)


@pytest.mark.parametrize(("state", "ids"), [(F32, False), (F32, True), (BF16, False), (F16, False)], ids=["f32", "ids", "bf16", "f16"])
def test_checkpoints_are_final_states(state, ids):
    laws.checkpoints_are_final_states(BY_WARPS, MODEL, state, ids=ids, lengths=(*laws.LENGTHS, 1000))


def test_checkpoints_of_a_batch():
    laws.checkpoints_of_a_batch(BY_WARPS, MODEL)


def test_many_checkpoints():
    """More than two steps of the search, each with a separate state; other positions in the same graph."""
    call = make(replace(MODEL, heads=2), 3000) | {"cu_seqlens": laws.starts_of((1000, 0, 1999), "cuda")}
    positions = torch.arange(1, 3001, device="cuda")
    out, states = ssmgen.chunk_scan(**call, checkpoint_positions=positions, return_checkpoints=True)
    some = torch.tensor([64, 999, 1000, 1001, 2999], device="cuda")
    _, wanted = ssmgen.chunk_scan(**call, checkpoint_positions=some, return_checkpoints=True)
    assert same(states[some - 1], wanted)
    again = torch.empty_like(wanted)
    graph = torch.cuda.CUDAGraph()
    call |= {"checkpoint_positions": some, "checkpoints_out": again, "out": out}
    with torch.cuda.graph(graph):
        ssmgen.chunk_scan(**call)
    some.copy_(some - 1)
    graph.replay()
    assert same(again, states[some - 1])


@pytest.mark.parametrize("sizes", [MODEL, replace(MODEL, heads=3, groups=1, headdim=80, d_state=48)], ids=["model", "odd"])
@pytest.mark.parametrize("lengths", [(4103,), (1, 1000, 0, 2000)], ids=["one", "several"])
@pytest.mark.parametrize("in_place", [False, True])
def test_division_changes_no_bit(sizes, lengths, in_place):
    """In place, the last part overwrites the initial state only after the other parts have read it."""
    call = make(sizes, sum(lengths), decay=1e-2) | {"cu_seqlens": laws.starts_of(lengths, "cuda"), "return_final_states": True}
    before = torch.randn(len(lengths), sizes.heads, sizes.headdim, sizes.d_state, device="cuda")
    start = {"initial_states": before} if in_place else {}
    wanted = BY_WARPS(**call, **start)
    for _ in range(50):
        own = before.clone()
        more = {"initial_states": own, "final_states_out": own} if in_place else {}
        found = DIVIDED(**call, **more)
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_copiers_change_no_bit():
    call = make(MODEL, 2, 1000, z=True) | {"return_final_states": True}
    whole, *others = [laws.launched(spec=laws.variant(**how), **call) for how in ({}, {"copiers": 1}, {"copiers": 4}, {"stages": 2})]
    assert all(same(a, b) for other in others for a, b in zip(other, whole, strict=True))


def test_the_same_bits_every_time():
    call = make(WIDE, 4, 300)
    seen = set()
    for _ in range(1000):
        out, state = ssmgen.chunk_scan(**call, return_final_states=True)
        total = bits(out).sum(dtype=torch.int64), bits(state).sum(dtype=torch.int64)
        seen.add(tuple(map(int, total)))
    assert len(seen) == 1
    digests = {hashlib.sha256(bits(ssmgen.chunk_scan(**call)).cpu().numpy().tobytes()).hexdigest() for _ in range(10)}
    assert len(digests) == 1


def test_programmatic_launches_change_no_bit():
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs sm_90")
    call = make(MODEL, 2, 700)
    assert same(ssmgen.chunk_scan(**call, pdl=True), ssmgen.chunk_scan(**call, pdl=False))


def test_in_a_graph():
    call = make(MODEL, 300)
    call |= {"cu_seqlens": laws.starts_of((100, 200), "cuda"), "out": torch.empty_like(call["x"])}
    state = torch.zeros(2, MODEL.heads, MODEL.headdim, MODEL.d_state, device="cuda")
    wanted = ssmgen.chunk_scan(**call, state=state).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ssmgen.chunk_scan(**call, state=state)
    call["out"].zero_()
    call["cu_seqlens"].copy_(laws.starts_of((100, 200), "cuda"))
    graph.replay()
    assert same(call["out"], wanted)
    call["cu_seqlens"].copy_(laws.starts_of((64, 236), "cuda"))  # other lengths, the same graph
    graph.replay()
    assert same(call["out"], ssmgen.chunk_scan(**call | {"out": torch.empty_like(call["out"])}))


@pytest.mark.parametrize("N", [16, 128])  # by each warp's products; by warpgroups, where there are such
def test_offsets_beyond_32_bits(N):
    """Tokens that lie 2^31 elements from the first, and a slot that does."""
    H, P, tokens = 2, 64, 70
    apart = 2**31 // 69 // 8 * 8 + 8
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of the card's memory")
    sizes = Sizes(heads=H, headdim=P, d_state=N, device="cuda")
    call = make(sizes, tokens)
    memory = torch.empty(tokens * apart, dtype=BF16, device="cuda")
    far = memory.as_strided((tokens, H, P), (apart, P, 1))
    far.copy_(call["x"])
    slot = 2**31 // (H * P * N) + 1
    pool = torch.empty((slot + 1) * H * P * N, dtype=BF16, device="cuda").view(-1, H, P, N)
    more = {"cu_seqlens": laws.starts_of((tokens,), "cuda"), "state_indices": torch.tensor([slot], device="cuda")}
    wanted, state = ssmgen.chunk_scan(**call, cu_seqlens=more["cu_seqlens"], return_final_states=True)
    assert same(ssmgen.chunk_scan(**call | {"x": far}, state=pool, **more), wanted) and same(pool[slot], state[0].to(BF16))
