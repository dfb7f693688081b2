"""mamba3_chunk_scan on a card: within rounding of float64 between poison, the same bits from all variants, cuts, graphs, long prompts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import all_same, error, same
from card_calls import arch, launch, needs_pdl
from mamba3_cases import POOLS, WRITTEN, on_card
from mamba3_prompt_cases import INITIAL, NAN, Call, cut, exact, make, starts_of, states, variant
from test_mamba3_chunk_scan import BOUND, CASES, STATE
from torch import Tensor

import ssmgen
from ssmgen.calls.checks import DTYPES
from ssmgen.emulator.check import trial_of
from ssmgen.engine.accuracy import norm_error
from ssmgen.engine.trial import TOLERANCE
from ssmgen.families.mamba3_chunk_scan import planning
from ssmgen.families.mamba3_chunk_scan.roles import Mamba3RolesSpec
from ssmgen.families.mamba3_chunk_scan.rules import space
from ssmgen.families.mamba3_chunk_scan.spec import OPERATOR, Mamba3ScanSpec
from ssmgen.families.mamba3_chunk_scan.warpgroups import Mamba3WarpgroupsSpec
from ssmgen.select.registry import select
from ssmgen.spec.kernel import Arch, Pdl

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
MODELS = {"siso-1.5b": {}, "mimo-1.5b": {"R": 4}, "rank-8": {"R": 8}}


def variants(problem: Any) -> list[Any]:
    """With and without PDL, where the card has it."""
    kinds = (Pdl.OFF, Pdl.TRIGGER_LOADED) if arch() >= Arch(90) else (Pdl.OFF,)
    return [spec for spec in space(problem, arch()) if spec.pdl in kinds]


def model(*lead: int, R: int = 1, H: int = 4, seed: int = 0) -> Call:
    """A call of a published model's head size on the card."""
    call = make(*lead, H=H, P=64, N=128, R=R, n=32, x=BF16, seed=seed)
    return {name: t.cuda() if isinstance(t, Tensor) else t for name, t in call.items()}


def to_cpu(call: Call) -> Call:
    return {name: t.cpu() if isinstance(t, Tensor) else t for name, t in call.items()}


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_within_rounding_of_float64_and_nothing_else_changes(name, segments):
    if segments > 1 and arch() < Arch(90):
        pytest.skip("needs clusters")
    problem = replace(CASES[name], segments=segments)
    if not variants(problem):
        pytest.skip("needs more shared memory")
    trial = trial_of(select(OPERATOR, problem, 1, arch(), False), 5, 7)
    if "state_indices" in trial.named:  # slots that no sequence names
        used = trial.named["state_indices"].long()
        for pool in POOLS:
            if pool in trial.named:
                unused = torch.ones(trial.named[pool].shape[0], dtype=torch.bool)
                unused[used[used >= 0]] = False
                trial.named[pool][unused] = math.nan
    exact_ = {n: trial.views[n].double() for n in WRITTEN if n in trial.views}
    before = {n: t.clone() for n, t in exact_.items()}
    trial.reference(trial.views | exact_)
    options = planning.Options(problem.rate.value, problem.rotary.value, problem.dt_softplus, problem.trap_sigmoid, final=problem.final)
    results: dict[Any, list[Any]] = {}  # by the order of sums

    def check(views: dict[str, Tensor]) -> None:
        for n, want in exact_.items():
            changed = (want != before[n]) & ~(want.isnan() & before[n].isnan())
            found = views[n].double().cpu()
            assert torch.equal(found[~changed].nan_to_num(7), before[n][~changed].nan_to_num(7)), f"{n} changed where it must stay"
            rounding = max(TOLERANCE[problem.x], TOLERANCE[DTYPES[views[n].dtype]])
            assert norm_error(found[changed], want[changed]) < (1e-4 if n == "angle_state" else 2 * rounding), n

    for spec in variants(problem):
        named, memory = on_card(trial.named)
        views = planning.CALLER.checked(named, options, None)
        launch(spec, planning.FAMILY, views, options, named)()
        torch.cuda.synchronize()
        assert memory.untouched(dict.fromkeys(WRITTEN)) == []
        result = [named[n].cpu() for n in WRITTEN if n in named]
        if spec.order not in results:
            check(views)
        assert all_same(result, results.setdefault(spec.order, result)), "variants with the same order of sums differ"


@pytest.mark.parametrize("name", MODELS)
def test_models_heads_between_steps(name):
    """Prompts of 1 to 300 tokens, packed, from a pool of poison; then steps."""
    lengths = (1, 64, 300, 0, 65)
    call = model(sum(lengths), **MODELS[name])
    first = [t.cuda() for t in states(to_cpu(call), 8, k=BF16)]
    pools = {n: torch.full_like(t, NAN) for n, t in zip(POOLS, first, strict=True)}
    for n, t in zip(POOLS, first, strict=True):
        pools[n][5] = t[5]
    slots = torch.tensor([5, 0, 7, 1, 3], device="cuda")
    how = {"cu_seqlens": starts_of(*lengths).cuda(), "state_indices": slots, "has_initial_state": slots == 5}
    wanted = exact(to_cpu(call | pools | how))
    y = ssmgen.mamba3_chunk_scan(**call, **pools, **how)
    assert error(y, wanted["out"]) < BOUND
    for slot in (5, 0, 7, 3):
        assert error(pools["state"][slot], wanted["state"][slot]) < STATE
        assert error(pools["k_state"][slot], wanted["k_state"][slot]) < STATE
    assert all(pools[n][[1, 2, 4, 6]].isnan().all() for n in POOLS)


@pytest.mark.parametrize("name", MODELS)
def test_packing_and_runs_change_no_bit(name):
    lengths = (0, 1, 15, 64, 65, 130)
    call = model(sum(lengths), **MODELS[name])
    starts = starts_of(*lengths)
    results = [ssmgen.mamba3_chunk_scan(**call, cu_seqlens=starts.cuda(), return_final_states=True) for _ in range(20)]
    assert all(all_same(result, results[0]) for result in results)  # a race would show
    for i, length in enumerate(lengths):
        if length:
            span = slice(int(starts[i]), int(starts[i + 1]))
            out, *own = ssmgen.mamba3_chunk_scan(**cut(cut(call, span), None), return_final_states=True)
            assert same(out[0], results[0][0][span]) and all_same((t[0] for t in own), (t[i] for t in results[0][1:]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_cut_at_a_chunk_changes_no_bit(name, chunks):
    R = MODELS[name].get("R", 1)
    at = chunks * (64 // R)
    call = model(2, at + 50, R=R)
    pools = [{n: torch.full_like(t.cuda(), NAN) for n, t in zip(POOLS, states(to_cpu(call), 2, k=BF16), strict=True)} for _ in range(2)]
    whole = ssmgen.mamba3_chunk_scan(**call, **pools[0])
    started = torch.ones(2, dtype=torch.bool, device="cuda")
    head = ssmgen.mamba3_chunk_scan(**cut(call, slice(None), slice(0, at)), **pools[1], has_initial_state=~started)
    tail = ssmgen.mamba3_chunk_scan(**cut(call, slice(None), slice(at, None)), **pools[1], has_initial_state=started)
    assert same(torch.cat([head, tail], 1), whole) and all(same(pools[0][n], pools[1][n]) for n in POOLS)


@pytest.mark.parametrize("at", [1, 7, 63, 65, 100])
def test_a_cut_anywhere_is_the_whole(at):
    call = model(1, 120, R=4, H=4)
    wanted = exact(to_cpu(call), return_final_states=True)
    head, *between = ssmgen.mamba3_chunk_scan(**cut(call, slice(None), slice(0, at)), return_final_states=True)
    tail, *end = ssmgen.mamba3_chunk_scan(
        **cut(call, slice(None), slice(at, None)), **dict(zip(INITIAL, between, strict=True)), return_final_states=True
    )
    assert error(torch.cat([head, tail], 1), wanted["out"]) < BOUND and error(end[0], wanted["state"]) < STATE


@pytest.mark.parametrize("name", MODELS)
def test_steps_go_on_where_the_prompt_ended(name):
    call = model(2, 84, H=4, **MODELS[name])
    wanted = exact(to_cpu(call), return_final_states=True)
    _, *after = ssmgen.mamba3_chunk_scan(**cut(call, slice(None), slice(0, 80)), return_final_states=True)
    pools = dict(zip(POOLS, after, strict=True))
    y = ssmgen.mamba3_state_update(**cut(call, slice(None), slice(80, 84)), **pools)
    assert error(y, wanted["out"][:, 80:]) < BOUND and error(pools["state"], wanted["state"]) < STATE
    assert (pools["angle_state"].double().cos().cpu() - wanted["angle_state"].cos()).abs().max() < 1e-5


@needs_pdl
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("segments", [3, 5, 8])
def test_parts_are_within_rounding_and_do_not_race(name, segments):
    """Packed sequences of several parts, of one chunk and without tokens, whose states are replaced in place; states hardly decay."""
    lengths = (700, 0, 40, 1030)
    call = model(sum(lengths), **MODELS[name]) | {"dt_softplus": False, "dt_bias": None}
    call["A"][:], call["dt"] = -30.0, torch.rand(sum(lengths), 4, device="cuda", generator=torch.Generator("cuda").manual_seed(3)) / 10
    first = {n: t.cuda() for n, t in zip(POOLS, states(to_cpu(call), 4, k=BF16), strict=True)}
    how = {"cu_seqlens": starts_of(*lengths).cuda(), "has_initial_state": torch.tensor([True, True, False, True], device="cuda")}
    wanted, results = exact(to_cpu(call | {n: t.clone() for n, t in first.items()} | how)), []
    for _ in range(20):
        pools = {n: t.clone() for n, t in first.items()}
        results.append([ssmgen.mamba3_chunk_scan(**call, **pools, **how, segments=segments), *pools.values()])
    assert all(all_same(result, results[0]) for result in results)
    y, S, k, _, angles = results[0]
    assert error(y, wanted["out"]) < BOUND and error(S, wanted["state"]) < STATE and error(k, wanted["k_state"]) < STATE
    assert (angles.double().cos().cpu() - wanted["angle_state"].cos()).abs().max() < 1e-5
    assert not same(results[0][0], ssmgen.mamba3_chunk_scan(**call, **{n: t.clone() for n, t in first.items()}, **how, segments=1))


@needs_pdl
@pytest.mark.parametrize("name", MODELS)
def test_two_parts_change_no_bit(name):
    """64 heads have 128 blocks, which run at once."""
    call = model(1, 1100, H=64, **MODELS[name])
    results = [ssmgen.mamba3_chunk_scan(**call, return_final_states=True, segments=n) for n in (1, 2, 2, 2)]
    assert all(all_same(result, results[0]) for result in results)


@needs_pdl
@pytest.mark.parametrize("H", [8, 24, 32])
def test_parts_of_packed_sequences_have_the_bits_of_each_alone(H):
    lengths = (1500, 64, 2100)
    call = model(sum(lengths), H=H)
    starts = starts_of(*lengths)
    packed, *last = ssmgen.mamba3_chunk_scan(**call, cu_seqlens=starts.cuda(), return_final_states=True)
    for i in range(len(lengths)):
        span = slice(int(starts[i]), int(starts[i + 1]))
        out, *own = ssmgen.mamba3_chunk_scan(**cut(cut(call, span), None), return_final_states=True)
        assert same(out[0], packed[span]) and all_same((t[0] for t in own), (t[i] for t in last))


def test_angles_of_131072_tokens():
    """All of them grow, to 30000 rad; sine and cosine stay within 1e-4. One head has 8 parts."""
    T, n = 131072, 4
    call = make(1, T, H=1, P=16, N=16, n=n, x=BF16, seed=5) | {"dt_softplus": False, "dt_bias": None, "z": None}
    g = torch.Generator().manual_seed(6)
    call |= {"dt": torch.rand(1, T, 1, generator=g) / 10 + 0.025, "angle": torch.randn(1, T, n, generator=g) + 3}
    card = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in call.items()}
    _, state, _, _, angle = ssmgen.mamba3_chunk_scan(**card, return_final_states=True)
    grown, after = (math.pi * call["dt"].double() * call["angle"].double().tanh()).sum(1), angle.double().cpu()[0]
    assert grown.min() > 29000 and after.abs().max() <= math.pi * (1 + 1e-7) and state.isfinite().all()
    assert (after.sin() - grown.sin()).abs().max() < 1e-4 and (after.cos() - grown.cos()).abs().max() < 1e-4


def test_a_graph_has_the_bits_of_eager_calls():
    call = model(2, 130, R=4)
    pools = [{n: torch.zeros_like(t.cuda()) for n, t in zip(POOLS, states(to_cpu(call), 2, k=BF16), strict=True)} for _ in range(2)]
    started = torch.ones(2, dtype=torch.bool, device="cuda")
    outs = [torch.empty_like(call["x"]) for _ in range(2)]
    given = [call | own | {"has_initial_state": started, "out": out} for own, out in zip(pools, outs, strict=True)]
    for _ in range(3):
        ssmgen.mamba3_chunk_scan(**given[0])
    ssmgen.warm(ssmgen.mamba3_chunk_scan, **given[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            ssmgen.mamba3_chunk_scan(**given[1])
    graph.replay()
    torch.cuda.synchronize()
    assert same(*outs) and all(same(pools[0][n], pools[1][n]) for n in POOLS)


@needs_pdl
def test_a_producer_that_writes_late_is_waited_for():
    """x is written just before, by a kernel of torch; PDL on and off give the same bits."""
    call = model(2, 300, R=4)
    wanted = ssmgen.mamba3_chunk_scan(**call, pdl=False)
    source = call["x"].clone()
    for _ in range(10):
        call["x"].fill_(NAN)
        torch.mul(source, 1.0, out=call["x"])
        assert same(ssmgen.mamba3_chunk_scan(**call, pdl=True), wanted)


def test_a_pool_of_more_than_2_31_elements():
    call = model(1, 70, H=64)
    small = {n: torch.zeros_like(t.cuda()) for n, t in zip(POOLS, states(to_cpu(call), 1, k=BF16), strict=True)}
    ssmgen.mamba3_chunk_scan(**call, **small)
    slots, last = 4104, 4103
    big = {n: torch.zeros(slots, *t.shape[1:], dtype=t.dtype, device="cuda") for n, t in small.items()}
    assert big["state"].numel() > 2**31
    ssmgen.mamba3_chunk_scan(**call, **big, state_indices=torch.tensor([last], device="cuda"))
    assert all(same(big[n][last], small[n][0]) for n in POOLS)


@needs_pdl
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spans", [2, 3, 4])
def test_spans_change_no_bit(name, spans):
    """64 heads have up to 256 blocks, more than run at once. States start and end in slots; one sequence is shorter than the spans."""
    lengths = (1100, 70, 0, 300)
    call = model(sum(lengths), H=64, **MODELS[name])
    first = {n: t.cuda() for n, t in zip(POOLS, states(to_cpu(call), 4, k=BF16), strict=True)}
    how = {"cu_seqlens": starts_of(*lengths).cuda(), "has_initial_state": torch.tensor([True, True, True, False], device="cuda")}
    results = []
    for share in (1, *[spans] * 20):
        pools = {n: t.clone() for n, t in first.items()}
        results.append([by_roles(call | pools | how, None, spans=share), *pools.values()])
    assert all(all_same(result, results[0]) for result in results)


@needs_pdl
@pytest.mark.parametrize("tokens", [40, 700, 2100])
def test_warpgroups_do_not_race(tokens):
    """In any number of spans, an odd number of heads, with logits of all heads and of each; 20 runs each, in place."""
    call = model(2, tokens, H=7)
    first = dict(zip(POOLS, (t.cuda() for t in states(to_cpu(call), 2, k=BF16)), strict=True))
    started = torch.tensor([True, False], device="cuda")
    for logits in (call["angle"], torch.randn(2, tokens, 7, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(4)).to(BF16)):
        call |= {"angle": logits}
        wanted, results = exact(to_cpu(call | first | {"has_initial_state": started})), []
        for spans in (1, 2, 3, 4) * 20:
            pools = {n: t.clone() for n, t in first.items()}
            built = ssmgen.mamba3_chunk_scan.build(**call, **pools, has_initial_state=started)
            spec = variant(Mamba3WarpgroupsSpec, spans=spans, pdl=Pdl.TRIGGER_LOADED)(built.problem()[0])
            if problems := spec.violations(arch()):
                pytest.skip(problems[0])
            built.operands["workspace"].fill_(NAN)
            built.launch_with(spec).at(built.pointers)()
            torch.cuda.synchronize()
            results.append([built.result, *pools.values()])
        assert all(all_same(result, results[0]) for result in results)
        assert error(results[0][0], wanted["out"]) < BOUND and error(results[0][1], wanted["state"]) < STATE


@needs_pdl
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("segments", [2, 3, 5, 8])
def test_parts_by_roles_have_the_bits_of_parts_without(name, segments):
    lengths = (700, 0, 40, 1030)
    call = model(sum(lengths), **MODELS[name]) | {"dt_softplus": False, "dt_bias": None}
    call["A"][:], call["dt"] = -30.0, torch.rand(sum(lengths), 4, device="cuda", generator=torch.Generator("cuda").manual_seed(3)) / 10
    first = {n: t.cuda() for n, t in zip(POOLS, states(to_cpu(call), 4, k=BF16), strict=True)}
    how = {"cu_seqlens": starts_of(*lengths).cuda(), "has_initial_state": torch.tensor([True, True, False, True], device="cuda")}
    pools = {n: t.clone() for n, t in first.items()}
    wanted = [by_warps(Mamba3ScanSpec, call | pools | how, segments, stages=1, parts=segments), *pools.values()]
    for _ in range(20):
        pools = {n: t.clone() for n, t in first.items()}
        assert all_same([by_roles(call | pools | how, segments, parts=segments), *pools.values()], wanted)


def by_roles(call: Call, segments: int | None, **how: Any) -> Tensor:
    """The result of a call by the variant with roles. Its pools are written in place."""
    return by_warps(Mamba3RolesSpec, call, segments, **how)


def by_warps(kind: type[Mamba3ScanSpec], call: Call, segments: int | None, **how: Any) -> Tensor:
    built = ssmgen.mamba3_chunk_scan.build(**call, segments=segments)
    spec = variant(kind, pdl=Pdl.TRIGGER_LOADED, **how)(built.problem()[0])
    if problems := spec.violations(arch()):
        pytest.skip(problems[0])
    built.launch_with(spec).at(built.pointers)()
    torch.cuda.synchronize()
    return built.result


def test_blocks_that_share_a_head_do_not_race():
    """Two and four blocks of a head replace, in place, the states that all of them read; two blocks per SM, though registers may spill."""
    call = model(3, 130, R=4, H=16)
    first = dict(zip(POOLS, (t.cuda() for t in states(to_cpu(call), 3, k=BF16)), strict=True))
    started = torch.ones(3, dtype=torch.bool, device="cuda")
    results = []
    for how in ({"tiles": 1}, {"tiles": 2}, {"tiles": 4}, {"spans": 2}, {"spans": 4}, {"stages": 1, "min_blocks": 2}):
        for _ in range(20):
            pools = {n: t.clone() for n, t in first.items()}
            built = ssmgen.mamba3_chunk_scan.build(**call, **pools, has_initial_state=started, segments=1)
            kind = Mamba3RolesSpec if "spans" in how else Mamba3ScanSpec
            spec = variant(kind, **how)(built.problem()[0])
            if spec.violations(arch()):
                break
            built.launch_with(spec).at(built.pointers)()
            torch.cuda.synchronize()
            results.append([built.result, *pools.values()])
    assert results and all(all_same(result, results[0]) for result in results)
