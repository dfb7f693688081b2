"""chunk_delta_rule in segments on a card: errors, bits, graphs, and blocks of two calls that meet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import prompt_laws as laws
import pytest
import torch
from prompt_cases import (
    ADVERSARIAL,
    BOUNDS,
    NAN,
    OF_HEADS,
    Case,
    by_warps,
    error,
    launched,
    make,
    problem_of,
    public,
    same,
    starts_of,
)
from repeats import are_alike
from ssu_cases import BF16, F32, Memory

import ssmgen

pytestmark = pytest.mark.gpu

FEW = Case("chunk_gated_delta_rule", heads=4, key_heads=2, head_k=128, head_v=128, device="cuda")
LENGTHS = (0, 1, 15, 63, 64, 65, 129, 300, 513, 1025, 2000)
SPARSE = (3,) * 40 + (1500, 1, 0, 1, 700)


def served(segments: int | None = None, **more: Any) -> Any:
    return partial(public, segments=segments, **more)


def warps(segments: int | None = None) -> Any:
    return partial(launched, spec=by_warps, segments=segments)


by_both = pytest.mark.parametrize("cut", [served, warps], ids=["served", "warps"])


@by_both
@pytest.mark.parametrize("kind", ["random", *OF_HEADS])
@pytest.mark.parametrize("sizes", [FEW, replace(FEW, head_k=96, head_v=192), replace(FEW, head_k=64)], ids=["k128", "k96v192", "k64v128"])
def test_errors_are_those_of_one_segment(cut, sizes, kind):
    laws.segments_are_as_accurate(cut(1), cut(6), sizes, 1500, **ADVERSARIAL.get(kind, {}))


@by_both
@pytest.mark.parametrize(("heads", "tokens", "segments"), [(4, 16400, 16), (32, 8192, 2)])
def test_the_rule(cut, heads, tokens, segments):
    """A call takes the rule's choice: `segments` segments after the first launch; the model's own state follows."""
    case = replace(FEW, heads=heads)
    call = make(case, 1, tokens, gate=0.05) | {"return_final_states": True}
    assert problem_of(case, **call).segments == segments
    for one, several in zip(cut(1)(case, **call), cut()(case, **call), strict=True):
        assert not same(one, several) and error(several, one.double().cpu()) <= BOUNDS[BF16]


@by_both
@pytest.mark.parametrize("lengths", [LENGTHS, SPARSE], ids=["all-may-be-cut", "few-may-be-cut"])
def test_packing(cut, lengths):
    laws.lengths_are_accurate(cut(4), FEW, lengths)
    laws.packing_changes_no_bit(cut(4), FEW, lengths)


@by_both
def test_neighbours_do_not_matter(cut):
    laws.neighbours_do_not_matter(cut(4), FEW, (65, 700, 1, 1025))


@by_both
@pytest.mark.parametrize(("state", "layout"), [(F32, "vk"), (BF16, "kv")])
def test_pools(cut, state, layout):
    laws.a_pool_is_touched_where_it_should_be(cut(2), FEW, state, layout)
    laws.states_of_a_pool_may_begin_elsewhere(cut(2), FEW, state, torch.int64)


@by_both
def test_states_may_go_where_they_come_from(cut):
    """There are more blocks than the card holds at once: a last segment may be over before a first one begins."""
    laws.states_may_go_where_they_come_from(cut(8), replace(FEW, heads=16, key_heads=4), (1500, 0, 2500) * 8)


@by_both
def test_states_at_positions_are_those_on_the_way(cut):
    call = make(FEW, 1, 1500) | {"return_final_states": True}
    positions = torch.tensor([64, 100, 384, 448, 1472, 1500], device="cuda")
    kept = torch.full((6, *FEW.state), NAN, device="cuda")
    out, last = cut(4)(FEW, **call)
    found = cut(4)(FEW, **call, checkpoint_positions=positions, checkpoints_out=kept, return_checkpoints=True)
    assert same(found[0], out) and same(found[1], last) and kept[1].isnan().all() and same(kept[5], last[0])
    for row in (0, 2, 3, 4):
        part = laws.cut(FEW, call, slice(None), slice(0, int(positions[row])))
        assert error(kept[row], cut(1)(FEW, **part)[1][0].double().cpu()) <= BOUNDS[BF16]


def test_the_workspace_is_as_large_as_it_says():
    memory, lengths = Memory("cuda"), (1500, 0, 65, 700)
    call = make(FEW, sum(lengths)) | {"cu_seqlens": starts_of(lengths, "cuda")}
    wanted = served(5)(FEW, **call)
    size = FEW.workspace(sum(lengths), len(lengths), 5)
    room = memory.fill("workspace", torch.full((size // 4,), NAN, device="cuda"))
    memory.seal()
    assert same(served(5)(FEW, **call, workspace=room.view(torch.uint8)), wanted) and not memory.untouched({"workspace": None})


@by_both
def test_the_same_bits_every_time(cut):
    """Consecutive calls share one workspace, so that kernels of neighbouring calls overlap."""
    size = FEW.workspace(6000, 2, 8)
    call = make(FEW, 2, 3000) | {"workspace": torch.empty(size, dtype=torch.uint8, device="cuda"), "return_final_states": True}
    assert are_alike(partial(cut(8), FEW, **call), 500)


def test_launches_change_no_bit():
    """Programmatic or not, bound, and in graphs whose lengths change."""
    call = make(FEW, 3000) | {"cu_seqlens": starts_of((2000, 1000), "cuda"), "return_final_states": True}
    call |= {"out": torch.empty_like(call["v"]), "final_states_out": torch.empty(2, *FEW.state, device="cuda")}
    wanted = [t.clone() for t in served(6)(FEW, **call)]
    if torch.cuda.get_device_capability()[0] >= 9:
        assert all(same(a, b) for a, b in zip(served(6, pdl=False)(FEW, **call), wanted, strict=True))
    bound = ssmgen.bind(ssmgen.chunk_gated_delta_rule, **call, segments=6)
    assert all(same(a, b) for a, b in zip(bound(), wanted, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        served(6)(FEW, **call)
    for lengths in ((2000, 1000), (2936, 64), (0, 3000), (30, 2970)):
        call["cu_seqlens"].copy_(starts_of(lengths, "cuda"))
        for _ in range(20):
            graph.replay()
        found = [call[name].clone() for name in ("out", "final_states_out")]
        other = call | {name: torch.empty_like(call[name]) for name in ("out", "final_states_out")}
        assert all(same(a, b) for a, b in zip(found, served(6)(FEW, **other), strict=True)), lengths
