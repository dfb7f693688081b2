"""chunk_scan on a card: the laws of its results at the sizes of models, offsets beyond 32 bits, and the same bits every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import repeats
import scan_cases as laws
import torch
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


KINDS: dict[str, tuple[Sizes, int, float, dict[str, Any]]] = {  # sizes, tokens, scale of A, and more
    "wide": (WIDE, 2048, 1.0, {}),
    "long-memory": (MODEL, 2048, 1e-3, {}),
    "strong-decay": (MODEL, 2048, 16.0, {"step": 3.0}),
    "f16-gate": (replace(MODEL, x=F16), 640, 0.1, {"z": True}),
    "p128": (replace(MODEL, headdim=128), 640, 0.1, {"z": True}),
    "n256": (replace(MODEL, d_state=256), 640, 0.1, {}),
    "p80": (replace(MODEL, headdim=80, d_state=16), 640, 0.1, {}),
    "f32": (replace(MODEL, x=F32), 2048, 1.0, {"z": True}),
    "f32-long-memory": (replace(MODEL, x=F32), 4096, 1e-3, {}),
    "f32-strong-decay": (replace(MODEL, x=F32, heads=4), 640, 16.0, {"step": 3.0}),
    "f32-n256": (replace(MODEL, x=F32, heads=4, d_state=256), 640, 0.1, {}),
}


@by_both
@pytest.mark.parametrize(("sizes", "tokens", "decay", "more"), KINDS.values(), ids=KINDS)
def test_results_are_those_of_float64(scan, sizes, tokens, decay, more):
    laws.is_accurate(scan, sizes, tokens, decay, **more)


LAWS: dict[str, Callable[[laws.Scan], None]] = {
    "packing": partial(laws.packing_changes_no_bit, case=MODEL, lengths=(*laws.LENGTHS, 1000, 2048)),
    # Enough heads that no sequence is divided among blocks.
    **{f"cut-{at}": partial(laws.a_cut_changes_no_bit, case=WIDE, tokens=2048, at=at) for at in (64, 1024, 1984)},
    "cut-f32": partial(laws.a_cut_changes_no_bit, case=replace(MODEL, x=F32), tokens=2048, at=1024),
    "pool-f32": partial(laws.a_pool_is_touched_where_it_should_be, case=MODEL, state=F32),
    "pool-bf16": partial(laws.a_pool_is_touched_where_it_should_be, case=MODEL, state=BF16),
    "decoding": partial(laws.decoding_goes_on, case=MODEL, tokens=500),
}


@by_both
@pytest.mark.parametrize("law", LAWS)
def test_laws(scan, law):
    LAWS[law](scan)


SERVED: dict[str, Callable[[laws.Scan], None]] = {
    "elsewhere-i32": partial(laws.states_of_a_pool_may_begin_elsewhere, case=MODEL, state=F32, index=torch.int32),
    "elsewhere-bf16-i64": partial(laws.states_of_a_pool_may_begin_elsewhere, case=MODEL, state=BF16, index=torch.int64),
    "elsewhere-in-order": partial(laws.states_of_a_pool_may_begin_elsewhere, case=WIDE, state=F32, index=None),
    "ids-go-on": partial(laws.ids_go_on, sizes=MODEL),
    "layout": partial(laws.layout_changes_no_bit, sizes=MODEL, offset=8),
}


@pytest.mark.parametrize("law", SERVED)
def test_laws_of_the_choice(law):
    SERVED[law](ssmgen.chunk_scan)


@pytest.mark.parametrize(("offset", "x"), [(8, BF16), (4, BF16), (2, BF16), (1, F32)])
def test_layout_changes_no_bit(offset, x):
    laws.layout_changes_no_bit(BY_WARPS, replace(MODEL, x=x), offset)


def test_ids_and_checkpoints():
    laws.ids_are_sequences(BY_WARPS, MODEL, (*laws.LENGTHS, 1000))
    laws.checkpoints_of_a_batch(BY_WARPS, MODEL)
    for state, ids in ((F32, False), (F32, True), (BF16, False), (F16, False)):
        laws.checkpoints_are_final_states(BY_WARPS, MODEL, state, ids=ids, lengths=(*laws.LENGTHS, 1000))


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
    call = make(WIDE, 4, 300) | {"return_final_states": True}
    assert repeats.are_alike(partial(ssmgen.chunk_scan, **call), 1000)


def test_programmatic_launches_change_no_bit():
    repeats.programmatic_launches_change_no_bit(ssmgen.chunk_scan, MODEL, 700)


def test_in_a_graph():
    repeats.a_graph_follows_its_lengths(ssmgen.chunk_scan, MODEL)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("N", [16, 128])  # by each warp's products; by warpgroups, where there are such
def test_offsets_beyond_32_bits(N):
    repeats.offsets_may_exceed_32_bits(ssmgen.chunk_scan, Sizes(heads=2, headdim=64, d_state=N, device="cuda"))
