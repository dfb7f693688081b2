"""Inputs of tuning: the expected time of a variant, and the measured cases."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
from selection import costly

from ssmgen.bench import case as bench_case
from ssmgen.errors import SsmgenError
from ssmgen.select import registry
from ssmgen.select import tuned as table
from ssmgen.select.catalog import OPERATOR_OF, OPERATORS
from ssmgen.select.models import find_model
from ssmgen.spec.kernel import SM90, Arch, DType, Index, Pdl, PoolMode
from ssmgen.tune import cases, model
from ssmgen.tune.command import TUNED
from ssmgen.variants.generate import default_variants

OP = "selective_state_update"
SM90A = Arch.parse("sm_90a")
PROBLEM = find_model("nemotron-h-8b").problem(DType.BF16, Index.I32, PoolMode.SINGLE)
RULE = registry.select(OP, PROBLEM, 8, SM90, True)
CARD = model.Card(SM90, 132, 4.2)


def test_expected_times():
    def us(grid, **more):
        return model.Candidate(RULE, grid, **more).expected_us(CARD)

    block, at_once = RULE.traffic
    assert (block, at_once) == (RULE.tile * 128 * 2, RULE.rows_per_step * 128 * 2)
    assert us(1) == pytest.approx(model.LATENCY_US * -(-block // at_once))  # nothing but waiting
    many = 100_000
    assert us(many) == pytest.approx(2 * many * block / CARD.tbs / 1e6, rel=0.05)  # nothing but memory
    assert us(many, registers=255) >= us(many) and us(1, registers=300) == float("inf")


def test_the_nearest_of_what_may_win_are_tried():
    specs = [s for s in OPERATORS[OP].space(PROBLEM, SM90) if s.pdl is Pdl.TRIGGER_LOADED and s != RULE]
    every = [model.Candidate(s, 32 * s.nheads * s.tiles) for s in specs]
    few = model.promising(every, CARD, 10, RULE)
    best = min(c.expected_us(CARD) for c in every)
    assert len(few) == 10 and all(c.expected_us(CARD) <= model.SLACK * best for c in few)
    apart = [sum(getattr(c.spec, n) != getattr(RULE, n) for n in ("lanes", "vec", "ilp", "tile", "threads", "prefetch")) for c in few]
    assert apart == sorted(apart) and apart[0] == 1
    assert model.promising([], CARD, 10, RULE) == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_all_kernels_of_what_is_tried_are_legal(operator):
    """Also those that a call launches before its last one."""
    kinds = tuple(kind for kind, name in OPERATOR_OF.items() if name == operator)
    chosen = next(s for s, arch in default_variants() if str(arch) == "sm_90a" and isinstance(s, kinds))
    (kind,) = (kind for kind in kinds if isinstance(chosen, kind))
    problem = kind(**{f.name: getattr(chosen, f.name) for f in fields(kind)})
    tried = list(OPERATORS[operator].space(problem, SM90A))
    assert tried and [(s, wrong) for s in tried for kernel in s.kernels if (wrong := kernel.violations(SM90A))] == []


# The cases.


@costly(8)
@pytest.mark.parametrize("operator", TUNED)
def test_cases_pose_what_the_operator_tunes(operator, monkeypatch):
    monkeypatch.setattr(bench_case, "MOST", 1)
    shapes = {"causal_conv1d": (1, 64, 32), "combine_splits": (16, 2), "chunk_scan": (2, 1, 1, 64), "chunk_delta_rule": (1, 2, 1, 64)}
    for family, shape in (shapes | {"selective_scan": (16, 1, 64), "skinny_linear": (64, 512)}).items():
        monkeypatch.setattr(f"ssmgen.families.{family}.bench.SHAPES", [shape])
    prompts = ("causal_conv1d", "chunk_scan", "chunk_delta_rule", "chunk_linear_attention", "mamba3_chunk_scan", "selective_scan")
    for family in prompts:
        monkeypatch.setattr(f"ssmgen.families.{family}.bench.PROMPT", 64)  # of 2048 tokens, two models' prompts hold 230 MiB
    names = [m for m in ("mamba-130m", "rwkv7-1.5b") if cases.used(operator, [m])][:1]
    found = []
    for case in itertools.islice(cases.cases(operator, names, batches=(2,), device="cpu"), 3):
        problem, size, _, pdl = case.call(case.sets - 1).problem()
        assert pdl is True and size >= 1 and case.sets >= 1 and OPERATOR_OF[type(problem)] in OPERATORS
        assert registry.select(OPERATOR_OF[type(problem)], problem, size, SM90, True)
        assert case.call(0).pointers != case.call(case.sets - 1).pointers or case.sets == 1
        found.append((table.bucket(problem), size))
    assert found


def test_models_that_do_not_use_an_operator():
    with pytest.raises(SsmgenError, match=r"--model is rwkv7-1\.5b; expected models that selective_state_update decodes"):
        next(cases.cases(OP, ["rwkv7-1.5b"]))
    for operator in (
        "causal_conv1d",
        "causal_conv1d_update",
        "replay_selective_state_update",
        "combine_splits",
        "gated_rms_norm",
        "gdn_layer",
        "kda_layer",
    ):
        with pytest.raises(SsmgenError, match=rf"--model is rwkv7-1\.5b; expected models that {operator} decodes"):
            next(cases.cases(operator, ["rwkv7-1.5b"]))
        assert not cases.used(operator, ["mamba-130m", "rwkv7-1.5b"])
    with pytest.raises(SsmgenError, match="is not tuned; expected one of causal_conv1d, "):
        next(cases.cases("softmax"))
