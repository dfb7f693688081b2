"""Rows of tables: the variants that they may name, the rules' losses against them, and the variants timed for them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_tune import GPU, RULE, home, row, ship

from ssmgen.cli import main
from ssmgen.select import registry
from ssmgen.select import tuned as table
from ssmgen.select.catalog import OPERATOR_OF, OPERATORS
from ssmgen.select.model_variants import problems_by_models
from ssmgen.spec.kernel import Arch
from ssmgen.tune import search
from ssmgen.tune.losses import loss

__all__ = ["home"]  # a fixture of all tests here


@pytest.mark.parametrize("operator", ["chunk_scan", "selective_scan"])
def test_rows_of_an_operators_other_spec_classes_are_believed(operator):
    """Some operators have further classes, for kernels by warpgroups or by roles, in addition to the class with the operator's name."""
    arch = Arch(90, "a")
    problem = next(p for p in problems_by_models() if OPERATOR_OF[type(p)] == operator)
    rule = registry.select(operator, problem, 4096, arch, True)
    alike = [s for s in OPERATORS[operator].space(problem, arch) if s != rule and s.pdl is rule.pdl and s.order == rule.order]
    other = next(s for s in alike if s.family != operator)
    said = {"operator": operator, "problem": table.bucket(problem), "runner_up": search.difference(other, rule), "arch": str(arch)}
    ship(replace(row(), **said, size=4096, spec=str(other), code=table.code_digest(other, arch)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = registry.explain(operator, problem, 4096, arch, True, GPU).chosen
    assert (chosen.rule, chosen.spec) == ("tuned", other)
    result = CliRunner().invoke(main, ["tuned", "--lost", "3"])
    assert result.exit_code == 1 and "(rules " in result.output


def test_rules_that_choose_the_runner_up_by_now_lose_what_it_does():
    second = row(us=2.0, rule_us=2.5, runner_up_us=2.02)  # the rules choose the runner-up
    assert loss(second) == pytest.approx(0.01)
    assert loss(replace(second, runner_up="tile=no")) == loss(replace(second, runner_up="")) == pytest.approx(0.25)


# Two splits of 1 us, for which no variant is good on both cards: docs/performance.md. f32 states of Mamba-3, SISO: lanes of a row and rows
# in flight that no rule can name.
KNOWN = {
    "NVIDIA_H100_80GB_HBM3": {"combine, dense (16, 2) d_v 512 bf16"},
    "NVIDIA_H200": {f"mamba3-siso-1.5b f32 T 1 batch {batch}" for batch in (1, 8)},
}


@pytest.mark.parametrize("gpu", KNOWN)
def test_rules_lose_no_more_than_3_percent_to_the_packages_tables(gpu):
    """Rows that are no longer trusted have no effect."""
    rows = table.read(Path(table.__file__).parent / f"{gpu}.json").values()
    assert rows and {row.label for row in rows if loss(row) > 0.03 and not table.staleness(row)} <= KNOWN[gpu]


def test_what_is_timed_again():
    slow, fast = [replace(RULE, prefetch=n) for n in (1, 2)]
    assert search._finalists({RULE: 2.0, slow: 2.1, fast: 1.9}, RULE) == [fast]
    assert search._finalists({RULE: 2.0, slow: 2.2, fast: 2.1}, RULE) == [fast], "the runner-up"
    assert search._finalists({RULE: 2.0}, RULE) == []
