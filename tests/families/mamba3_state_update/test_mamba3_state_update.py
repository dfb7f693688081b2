"""mamba3_state_update: the laws of its kernels' text, in the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from mamba3_cases import POOLS
from selection import costly
from torch import Tensor

import ssmgen
from ssmgen import emulator
from ssmgen.calls.checks import DTYPES
from ssmgen.emulator.check import check, trial_of
from ssmgen.engine.accuracy import norm_error
from ssmgen.engine.recurrences.mamba3.problem import Mamba3Problem, Rate, Rotary
from ssmgen.engine.stochastic_reference import stored
from ssmgen.engine.trial import TOLERANCE
from ssmgen.families.mamba3_state_update import planning
from ssmgen.families.mamba3_state_update.spec import candidates, space
from ssmgen.families.selective_state_update import planning as ssu
from ssmgen.select import registry
from ssmgen.spec.arguments import Arguments
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl, PoolMode, Update

SM90 = Arch.parse("sm_90a")
F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
emulated = pytest.mark.skipif(not emulator.available(), reason="needs g++")
pytestmark = pytest.mark.usefixtures("one_thread")

# The kernels' text.

PAIRS = Mamba3Problem(
    d_state=32, headdim=16, nheads=4, ngroups=2, angles=8, state=BF16, angle=BF16, D=F32, z=BF16, dt_bias=F32, row_norm=BF16, row_bias=F32,
    index=Index.I32,
)  # fmt: skip
HALVES = replace(PAIRS, rank=4, rotary=Rotary.HALVES, mimo=F32)
ALL_F32 = dict.fromkeys(("state", "k_state", "v_state", "x", "B", "dt", "A", "trap", "angle", "z", "row_norm", "out"), F32)
BARE: dict[str, Any] = {"angles": 0, "angle": None, "row_norm": None, "row_bias": None, "D": None, "z": None, "dt_bias": None}
ELEMENTS = {"state_loads": Loads.ELEMENT, "operand_loads": Loads.ELEMENT}
EACH: dict[str, Any] = {"several": True, "pool": PoolMode.SPLIT, "update": Update.EACH, "accepted": Index.I32}
CASES = {
    "siso": PAIRS,
    "mimo": HALVES,
    "siso-f32": replace(PAIRS, **ALL_F32),
    "mimo-f32": replace(HALVES, **ALL_F32),
    "published": replace(HALVES, d_state=128, headdim=64, nheads=2, ngroups=1, angles=32),
    "long-rows": replace(HALVES, d_state=256, headdim=20, nheads=2, ngroups=1, angles=40, rank=2),
    "p80": replace(PAIRS, headdim=80, nheads=2, d_state=64, angles=16),
    "p128": replace(PAIRS, headdim=128, nheads=1, ngroups=1, d_state=64, angles=32, state=F32),
    "n4": replace(PAIRS, d_state=4, headdim=1, angles=2),
    "rank-3-not-aligned": replace(HALVES, **ELEMENTS, rank=3),
    "rank-2-80-rows": replace(HALVES, rank=2, headdim=80, nheads=2, d_state=96, angles=20),
    "rank-8": replace(HALVES, rank=8, d_state=16),
    "rank-8-8-rows": replace(HALVES, rank=8, d_state=16, headdim=8),
    "n48-f16": replace(HALVES, d_state=48, angles=3, state=F16),
    "rank-8-128-rows": replace(HALVES, rank=8, d_state=128, headdim=128, nheads=2, ngroups=1, angles=64),
    "rank-8-256-rows": replace(HALVES, rank=8, d_state=128, headdim=256, nheads=2, ngroups=1, angles=64),
    "rank-4-80-rows": replace(HALVES, headdim=80, nheads=2, d_state=96, angles=20, k_state=F32, out=F32),
    "rank-4-pairs": replace(HALVES, rotary=Rotary.PAIRS, headdim=64, d_state=64, state_loads=Loads.ELEMENT),
    "rank-4-elements": replace(HALVES, **ELEMENTS),
    "rank-4-128-rows": replace(HALVES, headdim=128, nheads=1, ngroups=1, d_state=128, angles=64),
    "n8": replace(HALVES, d_state=8, angles=3),
    "pairs-not-aligned": replace(PAIRS, **ELEMENTS),
    "norm": replace(HALVES, norm_weight=F32),
    "norm-without-D": replace(PAIRS, norm_weight=BF16, D=None),
    "by-rank": replace(HALVES, by_rank=True, norm_weight=F32, z=None),
    "bare": replace(PAIRS, **BARE, dt_softplus=False, trap_sigmoid=False, rate=Rate.READY, index=Index.NONE),
    "softplus-f16": replace(HALVES, rate=Rate.SOFTPLUS, state=F16, k_state=F32, x=F16, mimo=BF16),
    "log-decay": replace(PAIRS, rate=Rate.LOG_DECAY, zero_padding=False),
    "split": replace(HALVES, pool=PoolMode.SPLIT, index=Index.I64),
    "noise": replace(PAIRS, philox_rounds=10),
    "tokens": replace(PAIRS, several=True),
    "noise-mimo": replace(HALVES, philox_rounds=10, headdim=32),
    "tokens-mimo-split": replace(HALVES, several=True, pool=PoolMode.SPLIT, norm_weight=F32),
    "drafts": replace(HALVES, **EACH),
    "drafts-noise": replace(PAIRS, **EACH, philox_rounds=10),
}  # fmt: skip


def chosen(problem: Mamba3Problem) -> Any:
    return registry.select("mamba3_state_update", problem, 1, SM90, True)


@costly(12)
@emulated
@pytest.mark.parametrize("name", CASES)
def test_within_rounding_of_float64(name):
    """The second row is padding, the third one's state is written nowhere if slots differ; all else stays."""
    outcome = check(chosen(CASES[name]), SM90, batch=4)
    assert outcome.passed, outcome.wrong


def run(spec: Any, named: dict[str, Tensor], options: Any) -> dict[str, Tensor]:
    """The operands after a launch, whose written ones are copies."""
    family = planning.FAMILY
    copies = {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) if name in family.written else t for name, t in named.items()
    }
    views = planning.CALLER.checked(copies, options, None)
    packed = Arguments(spec, family.values_of(spec, views, options)).at([copies[name].data_ptr() for name in spec.operands()])
    emulator.run(spec, SM90, family.grid_of(spec, views), packed, {name: copies[name] for name in spec.operands()}, family.written)
    return copies


def options_of(problem: Mamba3Problem, **changes: Any) -> Any:
    given = {"dt_softplus": problem.dt_softplus, "trap_sigmoid": problem.trap_sigmoid, "philox_rounds": problem.philox_rounds}
    return planning.Options(problem.rate.value, problem.rotary.value, **given | changes)


def arguments(problem: Mamba3Problem, named: dict[str, Tensor]) -> dict[str, Any]:
    """The public function's arguments for a trial's operands."""
    options = options_of(problem)._asdict() | {"zero_padding": problem.zero_padding}
    return (
        {"angle_state": None, "angle": None} | named | {name: value for name, value in options.items() if name != "philox_rounds" or value}
    )


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({4: torch.int32, 2: torch.int16}[t.element_size()])


def alike(a: dict[str, Tensor], b: dict[str, Tensor], names: Any = (*POOLS, "out")) -> bool:
    return all(torch.equal(bits(a[name]), bits(b[name])) for name in names if name in a)


@pytest.mark.parametrize("name", ["siso", "bare", "by-rank", "drafts"])
def test_the_public_function_takes_a_trial_s_operands(name):
    problem = CASES[name]
    trial = trial_of(chosen(problem), 3, 5)
    exact = {n: trial.views[n].double() for n in (*POOLS, "out") if n in trial.views}
    trial.reference(trial.views | exact)
    named = {n: t.clone() if n in (*POOLS, "out") else t for n, t in trial.named.items()}
    assert ssmgen.mamba3_state_update(**arguments(problem, named)) is named["out"]
    views = planning.CALLER.checked(named, options_of(problem), None)
    for n, want in exact.items():
        assert norm_error(views[n].double(), want) < TOLERANCE[DTYPES[views[n].dtype]], n


@costly(3)
@emulated
@pytest.mark.parametrize("name", ["siso", "mimo", "siso-f32", "p80", "norm", "noise", "tokens", "drafts"])
def test_variants_are_bit_equal(name):
    problem = replace(CASES[name], headdim=64) if CASES[name].products else CASES[name]  # one to four warps
    variants = [spec for spec in space(problem, SM90) if spec.pdl is Pdl.TRIGGER_LOADED]
    variants = variants[:: max(1, len(variants) // 5)] + [spec for _, spec, _ in candidates(problem, 1, SM90, False) if spec]
    named = trial_of(variants[0], 3, 0).named
    results = [run(spec, named, options_of(problem)) for spec in variants]
    assert len({(spec.lanes, spec.vec, spec.ilp, spec.threads, spec.staged) for spec in variants}) > 2
    assert all(alike(one, results[0]) for one in results)


@emulated
@pytest.mark.parametrize("staged", [False, True])
def test_products_lose_less_than_a_rounding(staged):
    """Tensor cores multiply sums of two terms of bf16, 2^-18 of a number from it: few numbers of a bf16 state round to a neighbour, none
    further. Sums of one term would change a third of them."""
    problem = replace(HALVES, headdim=32, d_state=64, angles=20, k_state=F32, out=F32)
    spec = replace(chosen(problem), staged=staged)
    trial = trial_of(spec, 3, 6)
    exact = {n: trial.views[n].double() for n in (*POOLS, "out")}
    trial.reference(trial.views | exact)
    found = run(spec, trial.named, options_of(problem))
    slots = [slot for slot in trial.named["state_indices"].tolist() if slot >= 0]
    state, want = found["state"][slots].double(), exact["state"][slots]
    largest = want.abs().max()
    assert (state != want.bfloat16().double()).double().mean() < 0.01
    assert ((state - want).abs() <= want.abs() * 2.0**-8 + largest * 2.0**-16).all()
    rows = [i for i, slot in enumerate(trial.named["state_indices"].tolist()) if slot >= 0]
    assert norm_error(found["out"][rows].double(), exact["out"].squeeze(1)[rows]) < 1e-5


@emulated
def test_a_row_has_the_same_bits_in_any_batch():
    spec, options = chosen(HALVES), options_of(HALVES)
    named = trial_of(spec, 5, 1).named
    together = run(spec, named, options)
    by_row = [name for name in ("x", "B", "C", "dt", "A", "trap", "angle", "z", "out", "state_indices") if name in named]
    for b in (0, 3):
        alone = run(spec, named | {name: named[name][b : b + 1] for name in by_row}, options)
        slot = int(named["state_indices"][b])
        assert torch.equal(bits(alone["out"][0]), bits(together["out"][b]))
        assert all(torch.equal(bits(alone[name][slot]), bits(together[name][slot])) for name in POOLS)


@emulated
@pytest.mark.parametrize("state", [F32, BF16])
def test_without_its_additions_it_has_the_bits_of_selective_state_update(state):
    problem = replace(PAIRS, state=state, row_norm=None, row_bias=None, trap_sigmoid=False, rate=Rate.READY, A=F32)
    named = dict(trial_of(chosen(problem), 3, 2).named)
    named |= {
        "trap": torch.ones_like(named["trap"]),
        "angle": torch.zeros_like(named["angle"]),
        "angle_state": torch.zeros_like(named["angle_state"]),
    }
    named["A"] = named["A"][:1].expand(3, -1).clone()
    ours = run(chosen(problem), named, options_of(problem))
    N, P = named["state"].shape[-1], named["x"].shape[-1]
    A = named["A"][0][:, None, None].expand(-1, P, N)
    theirs = {"state": named["state"].clone(), "A": A, "out": torch.empty_like(named["x"])}
    theirs |= {name: named[name] for name in ("x", "z", "state_indices")} | {name: named[name][:, 0] for name in ("B", "C")}
    theirs |= {name: named[name][..., None].expand(*named[name].shape, P) for name in ("dt", "D", "dt_bias")}
    options = ssu.Options(True, None, -1, 0, True)
    views = ssu.CALLER.checked(theirs, options, None)
    spec = registry.select(
        "selective_state_update", ssu.problem_of(views, {n: t.data_ptr() for n, t in views.items()}, options), 3, SM90, True
    )
    packed = Arguments(spec, ssu.kernel_values(spec, views, options)).at([theirs[name].data_ptr() for name in spec.operands()])
    emulator.run(spec, SM90, ssu.FAMILY.grid_of(spec, views), packed, {name: theirs[name] for name in spec.operands()})
    assert alike(ours, theirs, ("state", "out"))


@emulated
@pytest.mark.parametrize("problem", [replace(PAIRS, **ALL_F32), replace(HALVES, **ALL_F32)], ids=["siso", "mimo"])
def test_token_t_is_the_t_th_step_bit_by_bit(problem):
    several, single = replace(problem, several=True), chosen(problem)
    named = trial_of(chosen(several), 3, 3).named
    at_once = run(chosen(several), named, options_of(several))
    one_by_one = dict(named)
    for t in range(named["x"].shape[1]):
        of_token = {name: named[name][:, t] for name in ("x", "B", "C", "dt", "A", "trap", "angle", "z", "out")}
        one_by_one |= run(single, one_by_one | of_token, options_of(problem))
        assert torch.equal(bits(one_by_one["out"]), bits(at_once["out"][:, t]))
    assert alike(one_by_one, at_once, POOLS)


@emulated
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_noise_is_selective_state_update_s(dtype):
    """The state of the kernel with an f32 pool, rounded with the seed and the elements of its slot."""
    problem = replace(PAIRS, state=dtype, philox_rounds=7)
    named = trial_of(chosen(problem), 3, 4).named
    rounded = run(chosen(problem), named, options_of(problem))
    exact = replace(problem, state=F32, philox_rounds=0)
    wide = {name: t.float() if name == "state" else t for name, t in named.items() if name != "rand_seed"}
    precise = run(chosen(exact), wide, options_of(exact))
    for slot in named["state_indices"].tolist():
        if slot >= 0:
            seed = int(named["rand_seed"][slot])
            assert torch.equal(rounded["state"][slot], stored(precise["state"][slot], rounded["state"].dtype, seed, 7, slot))


def angles_stay_accurate(run: Callable[[Mamba3Problem, dict[str, Tensor]], Tensor], bound: float, T: int = 131072) -> None:
    """Tokens whose angles all grow, 131072 of them to 30000 rad; stored angles are wrapped. run: the angles after a call. bound: of their
    sines."""
    n = 4
    none: dict[str, Any] = {"z": None, "row_norm": None}
    problem = Mamba3Problem(d_state=8, headdim=1, nheads=1, angles=n, several=True, dt_softplus=False, **ALL_F32 | none)
    g = torch.Generator().manual_seed(0)
    zeros = {"state": (1, 1, 1, 8), "k_state": (1, 1, 1, 8), "v_state": (1, 1, 1), "angle_state": (1, 1, n), "x": (1, T, 1, 1)}
    named = {name: torch.zeros(shape) for name, shape in zeros.items()}
    named |= {"B": torch.ones(1, T, 1, 1, 8), "C": torch.ones(1, T, 1, 1, 8), "out": torch.zeros(1, T, 1, 1)}
    named |= {name: torch.rand(1, T, 1, generator=g) / 10 + 0.025 for name in ("dt", "A", "trap")}
    named["angle"] = torch.randn(1, T, n, generator=g) + 3
    after = run(problem, named).double().cpu().squeeze(1)
    grown = (math.pi * named["dt"].double() * named["angle"].double().tanh()).sum(1)
    assert grown.min() > 29000 * T / 131072 and after.abs().max() <= math.pi * (1 + 1e-7)
    assert (after.sin() - grown.sin()).abs().max() < bound and (after.cos() - grown.cos()).abs().max() < bound


@emulated
@pytest.mark.parametrize("T", [16384, pytest.param(32768, marks=pytest.mark.matrix)])  # the emulator takes 230 MiB for 131072
def test_angles_of_many_tokens(T):
    angles_stay_accurate(lambda problem, named: run(chosen(problem), named, options_of(problem))["angle_state"], 1e-4, T)
