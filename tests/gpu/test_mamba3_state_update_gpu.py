"""mamba3_state_update on a card: within rounding of float64 between poison, the same bits from all variants, graphs, and long sequences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from mamba3_cases import POOLS, WRITTEN, on_card
from test_mamba3_state_update import CASES, HALVES, PAIRS, angles_stay_accurate, arguments, bits, chosen, options_of
from torch import Tensor

import ssmgen
from ssmgen.calls.checks import DTYPES
from ssmgen.emulator.check import trial_of
from ssmgen.engine.accuracy import norm_error
from ssmgen.engine.recurrences.mamba3.problem import Mamba3Problem
from ssmgen.engine.trial import TOLERANCE
from ssmgen.families.mamba3_state_update import planning
from ssmgen.families.mamba3_state_update.spec import space
from ssmgen.launch import runtime
from ssmgen.spec.kernel import Arch, DType, Pdl

pytestmark = pytest.mark.gpu
SM90 = Arch.parse("sm_90a")
MORE = {
    "siso-1.5b": replace(PAIRS, d_state=128, headdim=64, nheads=64, ngroups=1, angles=32),
    "mimo-1.5b": replace(HALVES, d_state=128, headdim=64, nheads=64, ngroups=1, angles=32),
    "mimo-1.5b-f32": replace(HALVES, d_state=128, headdim=64, nheads=64, ngroups=1, angles=32, state=DType.F32),
    "mimo-1.5b-rank-8": replace(HALVES, d_state=128, headdim=64, nheads=64, ngroups=1, angles=64, rank=8),
}


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_within_rounding_of_float64_and_nothing_else_changes(name):
    problem = (CASES | MORE)[name]
    trial = trial_of(chosen(problem), 4, 7)
    if problem.index.value != "none":  # slots that no row names
        used = torch.cat([trial.named[n].flatten() for n in ("state_indices", "dst_state_indices") if n in trial.named]).long()
        for pool in POOLS:
            if pool in trial.named:
                unused = torch.ones(trial.named[pool].shape[0], dtype=torch.bool)
                unused[used[used >= 0]] = False
                trial.named[pool][unused] = math.nan
    named, memory = on_card(trial.named)
    exact = {n: trial.views[n].double() for n in WRITTEN if n in trial.views}
    before = {n: t.clone() for n, t in exact.items()}
    trial.reference(trial.views | exact)
    ssmgen.mamba3_state_update(**arguments(problem, named))
    torch.cuda.synchronize()
    options = options_of(problem, philox_rounds=0)
    views = planning.CALLER.checked({n: t for n, t in named.items() if n != "rand_seed"}, options, None)
    for n, want in exact.items():
        changed = (want != before[n]) & ~(want.isnan() & before[n].isnan())
        found = views[n].double().cpu()
        assert torch.equal(found[~changed].nan_to_num(7), before[n][~changed].nan_to_num(7)), f"{n} changed where it must stay"
        limit = max(TOLERANCE[DTYPES[views[n].dtype]], 1e-5) * 1.5
        assert norm_error(found[changed], want[changed]) < limit, n
    assert memory.untouched(dict.fromkeys(WRITTEN)) == []


def launched(spec: Any, named: dict[str, Tensor], options: Any) -> dict[str, Tensor]:
    copies = {
        n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t) if n in WRITTEN else t for n, t in named.items()
    }
    views = planning.CALLER.checked(copies, options, None)
    kernel = runtime.load(spec, 0, "mamba3_state_update")
    launch = runtime.Launch(kernel, 0, planning.FAMILY.grid_of(spec, views), planning.kernel_values(spec, views, options))
    launch.at([copies[n].data_ptr() for n in spec.operands()])()
    torch.cuda.synchronize()
    return copies


@pytest.mark.parametrize("name", ["siso", "mimo", "siso-f32", "norm", "noise", "tokens", "drafts", "siso-1.5b", "mimo-1.5b"])
def test_variants_are_bit_equal(name):
    problem = (CASES | MORE)[name]
    variants = [spec for spec in space(problem, SM90) if spec.pdl in (Pdl.OFF, Pdl.TRIGGER_LOADED)]
    variants = variants[:: max(1, len(variants) // 6)]
    variants += [replace(variants[-1], min_blocks=4)]
    named, _ = on_card(trial_of(variants[0], 3, 0).named)
    results = [launched(spec, named, options_of(problem)) for spec in variants for _ in range(2)]
    for result in results:
        assert all(torch.equal(bits(result[n]), bits(results[0][n])) for n in WRITTEN if n in result)


def test_a_graph_of_steps_has_the_bits_of_eager_ones():
    problem = MORE["mimo-1.5b"]
    trial = trial_of(chosen(problem), 8, 1)
    (eager, _), (captured, _) = on_card(trial.named), on_card(trial.named)
    for _ in range(4):
        ssmgen.mamba3_state_update(**arguments(problem, eager))
    ssmgen.warm(ssmgen.mamba3_state_update, **arguments(problem, captured))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            ssmgen.mamba3_state_update(**arguments(problem, captured))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(bits(eager[n]), bits(captured[n])) for n in WRITTEN)


def test_angles_of_131072_tokens():
    def run(problem: Mamba3Problem, named: dict[str, Tensor]) -> Tensor:
        card = {name: t.cuda() for name, t in named.items()}
        ssmgen.mamba3_state_update(**arguments(problem, card))
        return card["angle_state"]

    angles_stay_accurate(run, 3e-4)


def test_a_pool_of_more_than_2_31_elements():
    problem = MORE["siso-1.5b"]
    trial = trial_of(chosen(problem), 2, 3)
    slots, last = 4104, 4103
    named, _ = on_card(trial.named)
    big = {n: torch.zeros(slots, *named[n].shape[1:], dtype=named[n].dtype, device="cuda") for n in POOLS}
    assert big["state"].numel() > 2**31
    for n in POOLS:
        big[n][last] = named[n][int(trial.named["state_indices"][0])]
    ssmgen.mamba3_state_update(**arguments(problem, named))
    out = torch.zeros_like(named["out"])
    slot = torch.tensor([last, -1], dtype=torch.int32, device="cuda")
    ssmgen.mamba3_state_update(**arguments(problem, named | big | {"state_indices": slot, "out": out}))
    assert torch.equal(bits(out[0]), bits(named["out"][0]))
    assert torch.equal(bits(big["state"][last]), bits(named["state"][int(trial.named["state_indices"][0])]))
