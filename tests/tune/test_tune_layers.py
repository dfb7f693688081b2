"""Tuning of decode layers: the forms that are measured, and that rows of them are served."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from test_tune import GPU, home, row, ship

from ssmgen.bench import case as bench_case
from ssmgen.select import registry
from ssmgen.select import tuned as table
from ssmgen.select.catalog import OPERATOR_OF, OPERATORS
from ssmgen.select.models import find_model
from ssmgen.spec.kernel import SM90, DType, Index, changed
from ssmgen.tune import cases, search

__all__ = ["home"]  # a fixture of all tests here


@pytest.mark.parametrize("several", [{}, {"tokens": 4}], ids=["one", "slots"])
@pytest.mark.parametrize("model", ["nemotron-h-8b", "qwen3.5-35b-a3b"])
def test_rows_of_layers_are_served(model, several):
    """Rows also serve other types of operands other than the states. Each kernel of the row's variant is legal, including the norm's."""
    problem = find_model(model).layers((DType.BF16,), (Index.I32,), **several)[-1]
    operator = OPERATOR_OF[type(problem)]
    rule = registry.select(operator, problem, 8, SM90, True)
    other = next(
        s for s in OPERATORS[operator].space(problem, SM90) if s.pdl is rule.pdl and s.threads != rule.threads and s.order == rule.order
    )
    named = {"operator": operator, "problem": table.bucket(problem), "spec": str(other), "runner_up": search.difference(other, rule)}
    ship(replace(row(), **named, code=table.code_digest(other, SM90)))
    for posed in (problem, changed(problem, conv_weight=DType.F32), changed(problem, index=Index.I64)):
        found = registry.explain(operator, posed, 8, SM90, True, GPU).chosen
        assert found.rule == "tuned" and found.spec.threads == other.threads != rule.threads
        assert not any(kernel.violations(SM90) for kernel in found.spec.kernels)


@pytest.mark.parametrize("operator", ["mamba2_layer", "gdn_layer"])
def test_layers_of_several_tokens_have_two_forms(operator, monkeypatch):
    monkeypatch.setattr(bench_case, "MOST", 1)
    model = {"mamba2_layer": "mamba2-130m", "gdn_layer": "qwen3.5-35b-a3b"}[operator]
    kept, by_slot = itertools.islice(cases.cases(operator, [model], batches=(2,), tokens=(3,), tp=8, device="cpu"), 2)
    assert kept.label.endswith("T 3 kept batch 2") and by_slot.label.endswith("T 3 by slot batch 2")
    for case, update in ((kept, "none"), (by_slot, "each")):
        problem = case.call(case.sets - 1).problem()[0]
        assert problem.update.value == update and problem.conv.tokens == 3 and problem.intermediates == (case is kept)
