"""chunk_delta_rule on a card: the laws of its results at the sizes of models, offsets beyond 32 bits, and the same bits every time."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import Any

import delta_cases as laws
import pytest
import torch
from delta_cases import ADVERSARIAL, BF16, F16, F32, LENGTHS, PER_TOKEN, Sizes, make, same
from scan_cases import bits
from ssu_cases import Memory

import ssmgen
from ssmgen.families.chunk_delta_rule.chain import ChainSpec, candidates
from ssmgen.families.chunk_delta_rule.problem import DeltaProblem
from ssmgen.launch import runtime
from ssmgen.spec.kernel import Arch

pytestmark = pytest.mark.gpu

QWEN = Sizes(heads=32, key_heads=16, head_k=128, head_v=128, device="cuda")
FEW = replace(QWEN, heads=4, key_heads=2)
OLMO = replace(FEW, key_heads=4, head_k=96, head_v=192)
RAGGED = (0, 1, 63, 64, 65, 700, 1155)


def by_warps(problem: DeltaProblem) -> ChainSpec:
    """The variant for this card in which each warp computes its own products. Warpgroup variants, which may come first, differ bitwise."""
    arch = runtime.device_arch(torch.cuda.current_device())
    rules = candidates(problem, 1, arch, arch >= Arch(90))
    return next(spec for _, spec, _ in rules if spec and not spec.grouped and not spec.violations(arch))


SERVED = ssmgen.chunk_gated_delta_rule
BY_WARPS = partial(laws.launched, spec=by_warps)
by_both = pytest.mark.parametrize("run", [SERVED, BY_WARPS], ids=["served", "warps"])


@by_both
@pytest.mark.parametrize("kind", [{}, *ADVERSARIAL.values()], ids=["random", *ADVERSARIAL])
@pytest.mark.parametrize(
    "sizes",
    [FEW, replace(FEW, x=F16), OLMO, replace(FEW, head_k=64, head_v=64), replace(FEW, head_k=256, head_v=64)],
    ids=["k128", "f16", "k96v192", "k64", "k256v64"],
)
def test_results_are_those_of_float64(run, sizes, kind):
    laws.is_accurate(run, sizes, 700, **kind)


@by_both
def test_a_long_prompt_of_a_model(run):
    laws.is_accurate(run, QWEN, 1155)


@by_both
def test_lengths_are_accurate(run):
    laws.lengths_are_accurate(run, FEW, RAGGED)


@by_both
def test_packing_changes_no_bit(run):
    laws.packing_changes_no_bit(run, FEW, RAGGED)


@by_both
@pytest.mark.parametrize("cut", [64, 640, 1984])
def test_a_cut_changes_no_bit(run, cut):
    laws.a_cut_changes_no_bit(run, FEW, 2048, cut)


@by_both
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state", [F32, BF16, F16])
def test_a_pool_is_touched_where_it_should_be(run, state, layout):
    laws.a_pool_is_touched_where_it_should_be(run, FEW, state, layout)


@by_both
def test_neighbours_do_not_matter(run):
    laws.neighbours_do_not_matter(run, FEW, RAGGED)


@by_both
@pytest.mark.parametrize(("state", "index"), [(F32, torch.int32), (BF16, torch.int64), (F32, None)])
def test_states_of_a_pool_may_begin_elsewhere(run, state, index):
    laws.states_of_a_pool_may_begin_elsewhere(run, FEW, state, index)


@pytest.mark.parametrize(("run", "offset"), [(SERVED, 8), (BY_WARPS, 8), (BY_WARPS, 4), (BY_WARPS, 2)])
def test_layout_changes_no_bit(run, offset):
    laws.layout_changes_no_bit(run, FEW, offset)


@by_both
@pytest.mark.parametrize("state", [F32, BF16, F16])
def test_order_of_states_changes_no_bit(run, state):
    laws.order_of_states_changes_no_bit(run, OLMO, state)


@pytest.mark.parametrize(
    "runs",
    [(SERVED, ssmgen.chunk_delta_rule), (BY_WARPS, partial(BY_WARPS, function=ssmgen.chunk_delta_rule))],
    ids=["served", "warps"],
)
def test_gates_agree(runs):
    laws.gates_agree(*runs, FEW)


@by_both
@pytest.mark.parametrize("tokens", [500, 640])
def test_decoding_goes_on(run, tokens):
    laws.decoding_goes_on(run, FEW, tokens)


@by_both
@pytest.mark.parametrize("state", [F32, BF16])
def test_checkpoints_are_final_states(run, state):
    laws.checkpoints_are_final_states(run, FEW, state, (*LENGTHS, 1000))


@by_both
def test_checkpoints_of_a_batch(run):
    laws.checkpoints_of_a_batch(run, FEW)


@by_both
def test_a_prompt_in_pieces_and_then_steps(run):
    """The same tokens in one call; in pieces of whole chunks; and in two pieces followed by single steps."""
    call, tokens = make(FEW, 1, 700), (256, 192, 252)
    whole, last = run(**call, return_final_states=True)
    state, outs, begin = torch.zeros(1, *FEW.state, device="cuda"), [], 0
    for count in tokens:
        piece = {n: t[:, begin : begin + count] if n in PER_TOKEN else t for n, t in call.items()}
        if count % 64:
            stepped = state.clone()
            steps = ssmgen.gated_delta_rule(stepped, **piece)
            assert laws.error(steps, whole[:, begin:].double().cpu()) <= 2 * laws.BOUNDS[BF16]
            assert laws.error(stepped, last.double().cpu()) <= 2 * laws.BOUNDS[BF16]
        out, state = run(**piece, initial_states=state, return_final_states=True, final_states_out=state)
        outs.append(out)
        begin += count
    assert same(torch.cat(outs, 1), whole) and same(state, last)


def test_nothing_is_written_beyond_what_is_said():
    """All buffers are guarded and poisoned; the workspace has exactly its stated size."""
    memory, lengths = Memory("cuda"), (65, 0, 130, 1)
    call = make(FEW, sum(lengths)) | {"cu_seqlens": laws.starts_of(lengths, "cuda")}
    wanted, last = SERVED(**call, return_final_states=True)
    for name in PER_TOKEN:
        call[name] = memory.fill(name, call[name])
    out = memory.fill("out", torch.full_like(wanted, laws.NAN))
    final = memory.fill("final_states", torch.full_like(last, laws.NAN))
    size = ssmgen.chunk_delta_rule_workspace(sum(lengths), len(lengths), FEW.heads)
    room = memory.fill("workspace", torch.full((size // 4,), laws.NAN, device="cuda"))
    memory.seal()
    SERVED(**call, out=out, return_final_states=True, final_states_out=final, workspace=room.view(torch.uint8))
    assert not memory.untouched(dict.fromkeys(("out", "final_states", "workspace"))) and same(out, wanted) and same(final, last)


def test_what_a_workspace_held_does_not_matter():
    call = make(FEW, 2, 300)
    wanted = SERVED(**call)
    size = ssmgen.chunk_delta_rule_workspace(600, 2, FEW.heads)
    room = torch.full((2 * size,), 0xFF, dtype=torch.uint8, device="cuda")
    assert same(SERVED(**call, workspace=room), wanted)
    SERVED(**make(FEW, 3, 100, seed=1), workspace=room)
    assert same(SERVED(**call, workspace=room), wanted)


def digest(*tensors: Any) -> str:
    return hashlib.sha256(b"".join(bits(t).cpu().numpy().tobytes() for t in tensors)).hexdigest()


@by_both
def test_the_same_bits_every_time(run):
    """Consecutive calls share one workspace. Each call's first kernel may then overlap the last kernel of the call before."""
    call = make(FEW, 4, 300) | {"workspace": torch.empty(10**7, dtype=torch.uint8, device="cuda")}
    sums, seen = set(), set()
    for i in range(1000):
        out, state = run(**call, return_final_states=True)
        total = bits(out).sum(dtype=torch.int64), bits(state).sum(dtype=torch.int64)
        sums.add(tuple(map(int, total)))
        if i % 100 == 0:
            seen.add(digest(out, state))
    assert len(sums) == len(seen) == 1


def test_programmatic_launches_change_no_bit():
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic dependent launch needs sm_90")
    call = make(FEW, 2, 700)
    assert same(SERVED(**call, pdl=True), SERVED(**call, pdl=False))


def test_in_a_graph():
    """Other lengths in the same graph, and many consecutive replays."""
    call = make(FEW, 300)
    call |= {"cu_seqlens": laws.starts_of((100, 200), "cuda"), "out": torch.empty_like(call["v"])}
    state = torch.zeros(2, *FEW.state, device="cuda")
    wanted = SERVED(**call, state=state).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        SERVED(**call, state=state)
    for lengths in ((100, 200), (64, 236), (0, 300)):
        call["out"].zero_()
        call["cu_seqlens"].copy_(laws.starts_of(lengths, "cuda"))
        for _ in range(20):
            graph.replay()
        found, last = call["out"].clone(), state.clone()
        again = torch.full_like(state, laws.NAN)
        assert same(found, SERVED(**call | {"out": torch.empty_like(found)}, state=again))
        served = [i for i, n in enumerate(lengths) if n]
        assert same(last[served], again[served])
        assert lengths != (100, 200) or same(found, wanted)


@torch.no_grad()
def test_compiled_by_torch():
    call = make(FEW, 2, 130)
    before = laws.states(FEW, 2)

    def layer(before: torch.Tensor, **call: Any) -> Any:
        out, state = ssmgen.chunk_gated_delta_rule(**call, initial_states=before, return_final_states=True)
        return out * 2, state + 1

    wanted = layer(before, **call)
    compiled = torch.compile(layer, fullgraph=True)
    assert all(same(a, b) for _ in range(2) for a, b in zip(compiled(before, **call), wanted, strict=True))


def test_offsets_beyond_32_bits():
    """Tokens that lie 2^31 elements from the first, and a slot that does."""
    if torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of the card's memory")
    sizes, tokens = Sizes(heads=2, key_heads=1, head_k=64, head_v=64, device="cuda"), 70
    apart = 2**31 // 69 // 8 * 8 + 8
    call = make(sizes, tokens)
    far = torch.empty(tokens * apart, dtype=BF16, device="cuda").as_strided((tokens, 2, 64), (apart, 64, 1))
    far.copy_(call["v"])
    slot = 2**31 // (2 * 64 * 64) + 1
    pool = torch.empty((slot + 1) * 2 * 64 * 64, dtype=BF16, device="cuda").view(-1, 2, 64, 64)
    starts = laws.starts_of((tokens,), "cuda")
    wanted, state = SERVED(**call, cu_seqlens=starts, return_final_states=True)
    more = {"cu_seqlens": starts, "state": pool, "state_indices": torch.tensor([slot], device="cuda")}
    assert same(SERVED(**call | {"v": far}, **more), wanted) and same(pool[slot], state[0].to(BF16))


def test_images_beyond_32_bits():
    """A workspace of more than 4 GiB: the last sequence's output equals its output alone."""
    heads, count, length = 64, 64, 6400  # 4.6 GB of images, 3.4 GB of out
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of the card's memory")
    sizes = Sizes(heads=heads, key_heads=1, head_k=64, head_v=64, device="cuda")
    one = make(sizes, 1, length)
    call = {n: t.expand(count, *t.shape[1:]) if n in PER_TOKEN else t for n, t in one.items()}
    assert ssmgen.chunk_delta_rule_workspace(count * length, count, heads) > 2**32
    out = SERVED(**call)
    assert same(out[-1], SERVED(**one)[0]) and same(out[0], out[-1])
