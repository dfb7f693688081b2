"""chunk_scan by warpgroups on a card: the laws of its results, with sequences that blocks divide and with such that they do not."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import Any

import attention_cases
import pytest
import scan_cases as laws
import torch
from bits import bits
from repeats import others_in_graphs
from scan_cases import BF16, BOUNDS, F16, F32, SM90, Sizes, error, exact, make, same

import ssmgen
from ssmgen.families.chunk_scan.spec import OPERATOR, ScanProblem
from ssmgen.families.chunk_scan.warpgroups import WarpgroupScanSpec, warpgroup_space
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Pdl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
]

PARTS = {128: 1, 32: 3, 24: 4, 16: 6, 8: 8}  # by heads: how many blocks divide a sequence
LENGTHS = (1, 15, 63, 64, 65, 127, 129, 300, 511, 512, 513, 768, 769, 1023, 1025, 1500)
of_heads = pytest.mark.parametrize("heads", PARTS)


def sizes_of(heads: int) -> Sizes:
    return Sizes(heads=heads, groups=8, headdim=64, d_state=128, device="cuda")


def variant(heads: int, problem: ScanProblem) -> WarpgroupScanSpec:
    spec = select(OPERATOR, problem, heads, SM90, True)
    assert isinstance(spec, WarpgroupScanSpec) and spec.parts == PARTS[heads]
    return spec


def by(heads: int, **more: Any) -> laws.Scan:
    return partial(laws.launched, spec=partial(variant, heads), **more)


@of_heads
def test_lengths(heads):
    laws.lengths_are_accurate(by(heads), sizes_of(heads), LENGTHS)


@of_heads
@pytest.mark.parametrize("decay", [1e-3, 16.0])
def test_long_and_short_memories(heads, decay):
    laws.is_accurate(by(heads), replace(sizes_of(heads), groups=1), 1500, decay, z=True, step=3.0 if decay > 1 else 0.0)


@of_heads
@pytest.mark.parametrize("x", [BF16, F16])
@pytest.mark.parametrize(("headdim", "d_state"), [(64, 64), (128, 64), (128, 128)])
def test_other_sizes(heads, x, headdim, d_state):
    sizes = replace(sizes_of(heads), x=x, headdim=headdim, d_state=d_state)
    laws.is_accurate(ssmgen.chunk_scan, sizes, 700, 0.1)


@of_heads
def test_packing_changes_no_bit(heads):
    laws.packing_changes_no_bit(by(heads), sizes_of(heads), (*laws.LENGTHS, 512, 513, 1500))


@of_heads
def test_neighbours_do_not_matter(heads):
    laws.neighbours_do_not_matter(by(heads), sizes_of(heads), (65, 0, 700, 1, 1500, 64))


@of_heads
@pytest.mark.parametrize("state", [F32, BF16, F16])
def test_a_pool_is_touched_where_it_should_be(heads, state):
    laws.a_pool_is_touched_where_it_should_be(by(heads), sizes_of(heads), state)


@pytest.mark.parametrize("cut", [64, 640, 1472])
def test_a_cut_changes_no_bit(cut):
    """No sequence is divided: there are many heads, or the call requests it."""
    laws.a_cut_changes_no_bit(by(128), sizes_of(128), 1500, cut)
    laws.a_cut_changes_no_bit(partial(ssmgen.chunk_scan, segments=1), sizes_of(16), 1500, cut)


# No sequence is divided: there are many heads, or the call requests it.
whole = pytest.mark.parametrize(
    ("heads", "scan"), [(128, by(128)), (16, partial(ssmgen.chunk_scan, segments=1))], ids=["128-heads", "one-segment"]
)


@whole
def test_ids_are_sequences(heads, scan):
    laws.ids_are_sequences(scan, sizes_of(heads), (*laws.LENGTHS, 1000))


@of_heads
def test_ids_go_on(heads):
    laws.ids_go_on(by(heads), sizes_of(heads))


@whole
@pytest.mark.parametrize(("state", "ids"), [(F32, False), (F32, True), (BF16, False), (F16, False)], ids=["f32", "ids", "bf16", "f16"])
def test_checkpoints_are_final_states(heads, scan, state, ids):
    laws.checkpoints_are_final_states(scan, sizes_of(heads), state, ids=ids, lengths=(*laws.LENGTHS, 700))


@whole
def test_checkpoints_of_a_batch(heads, scan):
    laws.checkpoints_of_a_batch(scan, sizes_of(heads))


@of_heads
def test_ids_and_checkpoints_of_long_sequences(heads):
    """Divided or not, they are right, and they change no bit of the results without positions."""
    tokens = 1500
    call = make(sizes_of(heads), 2, tokens, decay=0.02)
    call["seq_idx"] = (torch.arange(tokens, device="cuda") // 350).int().repeat(2, 1)
    listed = torch.tensor([1, 63, 350, 351, 512, 513, 700, 1499, 1500, 1501, 2200, 3000], device="cuda")
    more = {"return_final_states": True, "checkpoint_positions": listed, "return_checkpoints": True}
    wanted, found = exact(call, **more), by(heads)(**call, **more)
    for name, own in zip(("out", "final_states", "checkpoints"), found, strict=True):
        assert error(own, wanted[name]) <= BOUNDS[BF16], name
    plain = by(heads)(**call, return_final_states=True)
    assert all(same(a, b) for a, b in zip(found, plain, strict=False)) and same(found[2][-1], found[1][1])


@of_heads
def test_place_in_the_batch_changes_no_bit(heads):
    call, scan = make(sizes_of(heads), 5, 1100), by(heads)
    whole, states = scan(**call, return_final_states=True)
    for i in (0, 4):
        own = {n: t[i : i + 1] if n in ("x", "dt", "B", "C") else t for n, t in call.items()}
        out, last = scan(**own, return_final_states=True)
        assert same(out[0], whole[i]) and same(last[0], states[i])


@of_heads
def test_stages_and_launches_change_no_bit(heads):
    call = make(sizes_of(heads), 2, 1100) | {"return_final_states": True}
    wanted = by(heads)(**call)
    served = variant(heads, laws.problem_of(**call))
    others = {(s.stages, s.pdl) for s in warpgroup_space(laws.problem_of(**call), SM90)}
    assert len(others) > len(Pdl)
    for stages, pdl in others:
        spec = replace(served, stages=stages, pdl=pdl)
        assert all(same(a, b) for a, b in zip(laws.launched(spec=spec, **call), wanted, strict=True)), spec


@of_heads
def test_the_same_bits_every_time(heads):
    call, scan = make(sizes_of(heads), 3, 1100), by(heads)
    seen = set()
    for _ in range(1000):
        out, state = scan(**call, return_final_states=True)
        seen.add((int(bits(out).sum(dtype=torch.int64)), int(bits(state).sum(dtype=torch.int64))))
    assert len(seen) == 1
    assert len({hashlib.sha256(bits(scan(**call)).cpu().numpy().tobytes()).hexdigest() for _ in range(10)}) == 1


@of_heads
def test_the_same_bits_ten_thousand_times(heads):
    """In graphs."""
    assert not others_in_graphs(by(heads), make(sizes_of(heads), 2, 1100))


@of_heads
def test_in_a_graph(heads):
    """The same graph serves other lengths, for which blocks divide different sequences."""
    call = make(sizes_of(heads), 1500)
    call |= {"cu_seqlens": laws.starts_of((100, 1400), "cuda"), "out": torch.empty_like(call["x"])}
    states = torch.empty(2, heads, 64, 128, device="cuda")
    call |= {"final_states_out": states, "return_final_states": True}
    ssmgen.chunk_scan(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ssmgen.chunk_scan(**call)
    for lengths in ((100, 1400), (700, 800), (1500, 0), (64, 1000)):
        call["cu_seqlens"].copy_(laws.starts_of(lengths, "cuda"))
        call["out"].zero_()
        states.fill_(laws.NAN)
        graph.replay()
        again = call | {"out": torch.zeros_like(call["out"]), "final_states_out": torch.empty_like(states)}
        out, last = by(heads)(**again)
        assert same(call["out"], out) and same(states, last)


@pytest.mark.parametrize("form", attention_cases.FORMS)
@of_heads
def test_linear_attention(form, heads):
    name, call = attention_cases.make(form, sizes_of(heads), 2, 1100)
    attention_cases.is_accurate(by(heads, function=getattr(ssmgen, name)), call)
