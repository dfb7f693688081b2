"""Which variant serves a problem, and why."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from selection import costly

from ssmgen.bench import benchmarks
from ssmgen.bench.axes import users
from ssmgen.engine.norm_kernel import NormProblem
from ssmgen.engine.recurrences.attention.problem import Layout, Ring
from ssmgen.errors import UnsupportedError
from ssmgen.families.selective_state_update.spec import OPERATOR, SsuProblem, SsuSpec
from ssmgen.select import registry
from ssmgen.select.catalog import OPERATOR_OF
from ssmgen.select.model_variants import problems_by_models, specs_for
from ssmgen.select.models import find_model, models
from ssmgen.spec.kernel import Arch, DType, Index, Loads, Pdl, PoolMode

SM90, SM80 = Arch.parse("sm_90a"), Arch.parse("sm_80")
MAMBA2 = SsuProblem(d_state=128, headdim=64, nheads=128, ngroups=8, state=DType.BF16, index=Index.I32)
MAMBA1 = SsuProblem(d_state=16, headdim=1536, tied=False, z=DType.BF16, index=Index.I32)
QWEN = find_model("qwen3.5-397b-a17b").problem(DType.BF16, Index.I32, PoolMode.SINGLE)
WITHOUT_A_RING = ("lightning_attn", "rwkv7")


@costly(2)
@pytest.mark.parametrize("arch", [SM80, SM90, Arch.parse("sm_100a"), Arch.parse("sm_120")], ids=str)
def test_every_model_has_a_variant_at_every_batch(arch):
    several = {"tokens": 4, "intermediates": True}
    mamba2 = [m for m in models().values() if m.kind == "mamba2"]
    problems = [(names[0], problem) for problem, names in problems_by_models().items()]
    problems += [(m.name, m.problem(m.state, Index.I32, PoolMode.SINGLE, **several)) for m in mamba2]
    verified = several | {"update_state": False}
    layered = [*mamba2, find_model("qwen3.5-397b-a17b"), find_model("kimi-linear-48b-a3b")]
    problems += [(m.name, p) for m in layered for how in (verified, {"tokens": 8}) for p in m.layers((), (Index.I32,), **how)]
    unused = {kind for kind, op in OPERATOR_OF.items() if op in benchmarks() and not users(op)}  # merged attention
    assert {type(problem) for _, problem in problems} == set(OPERATOR_OF) - unused
    for name, problem in problems:
        for batch in (1, 8, 64, 1024):
            spec = registry.select(OPERATOR_OF[type(problem)], problem, batch, arch, arch >= SM90)
            assert not spec.violations(arch), name
            found = registry.explain(OPERATOR_OF[type(problem)], problem, batch, arch, arch >= SM90)
            assert found.chosen.rule != "generic", name


@pytest.mark.parametrize("arch", [SM80, SM90], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        {"tokens": 4},
        {"tokens": 9, "intermediates": True},
        {"tokens": 4, "update_state": False},
        {"layout": Layout.KV},
        {"tokens": 4, "update_state": False, "ring": Ring.STORE},
        {"ring": Ring.COMMIT, "layers": True},
    ],
    ids=lambda call: "-".join(call),
)
def test_every_linear_attention_model_has_a_variant_of_every_form(call, arch):
    for model in models().values():
        for tp in (1, 2) if model.operator == "linear_attention" and not ("ring" in call and model.function in WITHOUT_A_RING) else ():
            for problem in model.divided(tp).problems(states=tuple(DType), **call):
                for batch in (1, 1024):
                    found = registry.explain("linear_attention", problem, batch, arch, arch >= SM90)
                    assert found.chosen and found.chosen.rule != "generic", (model.name, found)


@pytest.mark.parametrize("d_state", [2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("headdim", [1, 7, 32, 64, 80, 128, 200, 2064])
@pytest.mark.parametrize("state", DType)
def test_every_shape_is_served(d_state, headdim, state):
    problem = SsuProblem(d_state=d_state, headdim=headdim, nheads=3, state=state, index=Index.I64, pool=PoolMode.SPLIT)
    for batch in (1, 4096):
        for loads in Loads:
            spec = registry.select(OPERATOR, replace(problem, state_loads=loads, operand_loads=loads), batch, SM90, True)
            assert spec.tile * spec.d_state * spec.state.size <= 40 * 1024


@pytest.mark.parametrize(("d_state", "state"), [(2, DType.F32), (2, DType.BF16), (4, DType.BF16), (12, DType.F16)])
def test_rows_below_16_bytes_are_not_prefetched(d_state, state):
    """Their slots need not lie at multiples of 16 bytes, which the bulk prefetch demands."""
    problem = SsuProblem(d_state=d_state, headdim=4096, state=state, tied=False, index=Index.I32)
    assert all(registry.select(OPERATOR, problem, b, SM90, True).prefetch == 0 for b in (1, 64, 4096))


def test_batch_changes_only_how():
    small, large = (registry.select(OPERATOR, MAMBA2, b, SM90, True) for b in (1, 256))
    assert small != large and small.prefetch == 0 and large.prefetch > 0
    assert all(getattr(small, f) == getattr(large, f) for f in SsuProblem.__dataclass_fields__)


def test_pdl_is_a_wish_that_the_caller_may_deny():
    assert registry.select(OPERATOR, MAMBA1, 8, SM90, False).pdl is Pdl.OFF
    assert registry.select(OPERATOR, MAMBA1, 8, SM90, True).pdl is not Pdl.OFF


def test_explanation_says_which_rule_and_why_not_the_others():
    found = registry.explain(OPERATOR, MAMBA2, 256, SM90, True)
    assert found.chosen.rule == "bandwidth"
    reasons = {v.rule: v.reason for v in found.verdicts}
    assert (
        reasons["latency"] == "the state traffic is 1024.0 MiB; the rule is for at most 48"
        and reasons["generic"] == "bandwidth comes first"
    )
    assert "-> bandwidth" in str(found)


def test_choosing_stops_at_the_first_legal_variant(monkeypatch):
    """An explanation checks all variants. A choice is made for each new form of call, and for dozens of sizes in a build."""
    checked = []
    violations = SsuSpec.violations
    monkeypatch.setattr(SsuSpec, "violations", lambda spec, arch: checked.append(spec) or violations(spec, arch))
    registry.forget()
    chosen = registry.select(OPERATOR, MAMBA2, 1, SM90, True)
    assert checked == [chosen]
    explained = registry.explain(OPERATOR, MAMBA2, 1, SM90, True)
    assert explained.chosen.spec == chosen and len(checked) > 2


def test_unsupported_gives_every_reason():
    odd = SsuProblem(d_state=130, headdim=64, nheads=10, ngroups=4)
    assert len(registry.explain(OPERATOR, odd, 1, SM90, True).reasons) == 2
    with pytest.raises(UnsupportedError) as e:
        registry.select(OPERATOR, odd, 1, SM90, True)
    assert "with d_state 130; expected state_loads=element" in str(e.value) and "expected a multiple of ngroups 4" in str(e.value)
    assert registry.explain(OPERATOR, MAMBA1, 1, SM80, False).reasons == []


def test_below_sm_80_is_refused():
    assert any("sm_80" in r for r in registry.explain(OPERATOR, MAMBA1, 1, Arch(75), False).reasons)


@pytest.mark.parametrize("problem", [MAMBA1, MAMBA2, QWEN], ids=["mamba1", "mamba2", "qwen3.5"])
def test_variants_are_all_that_any_batch_is_given(problem):
    operator = OPERATOR_OF[type(problem)]
    found = set(registry.variants(operator, problem, SM90, True, max_size=300))
    assert found == {registry.select(operator, problem, b, SM90, True) for b in range(1, 301)}


@pytest.mark.parametrize("problem", [MAMBA1, MAMBA2, QWEN], ids=["mamba1", "mamba2", "qwen3.5"])
def test_ranges_are_what_each_batch_is_given(problem):
    operator = OPERATOR_OF[type(problem)]
    found = registry.ranges(operator, problem, SM90, True, max_size=300)
    assert [first for first, _, _ in found] == [1, *(last + 1 for _, last, _ in found[:-1])] and found[-1][1] == 300
    for first, last, verdict in found:
        for batch in range(first, last + 1):
            assert registry.explain(operator, problem, batch, SM90, True).chosen == verdict
    assert all(a[2] != b[2] for a, b in pairwise(found)) and len(found) > 1


def test_specs_for_a_model_hold_both_pdl_choices_from_sm_90_on():
    for problem in (MAMBA2, QWEN):
        assert {s.pdl is Pdl.OFF for s in specs_for([problem], SM90)} == {True, False}
    assert {s.family for s in specs_for([MAMBA2, QWEN], SM90)} == {"selective_state_update", "linear_attention"}
    assert {s.pdl for s in specs_for([MAMBA2], SM80)} == {Pdl.OFF}


@pytest.mark.parametrize("gpu", [None, "NVIDIA H200"])
def test_small_norms_trigger_early_whether_measured_or_ruled(gpu):
    problem = NormProblem(size=1024, grouped=True)

    def pdl(groups: int, wanted: bool = True) -> Pdl:
        return registry.select("gated_rms_norm", problem, groups, SM90, wanted, gpu).pdl

    assert [pdl(8), pdl(128), pdl(129)] == [Pdl.TRIGGER_FIRST, Pdl.TRIGGER_FIRST, Pdl.TRIGGER_LOADED] and pdl(8, False) is Pdl.OFF
    if gpu:
        assert registry.explain("gated_rms_norm", problem, 8, SM90, True, gpu).chosen.rule == "tuned"
