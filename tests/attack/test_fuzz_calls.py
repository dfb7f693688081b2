"""Seeded bad calls of every function: a small part of `python tests/attack/fuzz.py --cases 50000`; and the fuzzer finds planted errors."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import fuzz
import fuzz_mutations as mutations
import pytest
import torch
from fuzz import forms
from selection import costly

import ssmgen
from ssmgen.calls.api import FUNCTIONS


@costly(2)
@pytest.mark.parametrize("seed", range(4))
def test_a_bad_call_works_or_says_why_not(seed):
    report = fuzz.campaign(1000, seed)
    assert sum(report.counts.values()) == 1000
    assert not report.broken, "\n".join(f"{b.call}\n    {b.how}" for b in report.broken)


def test_every_public_function_is_called_and_every_form_works():
    assert {f.function for f in forms() if f.public} == set(FUNCTIONS)
    for form in forms():
        report = fuzz.Report()
        fuzz.run(fuzz.Case(form, fuzz.with_own_memory(form.arguments), []), report)
        assert [outcome for _, outcome in report.counts] == ["works"], (form.id, report.broken)


def test_every_change_can_be_made():
    rng, t = Random(0), torch.randn(3, 4, 4)
    for change in mutations.TENSORS:
        if change is not mutations.other_kind:
            assert isinstance(change(t, rng), torch.Tensor), change.__name__


def _raises(state, **rest):
    raise IndexError("tuple index out of range")


def _changes_an_input(state, x, **rest):
    x.zero_()
    return ssmgen.selective_state_update(state, x, **rest)


def _changes_and_raises(state, **rest):
    state.zero_()
    raise ssmgen.errors.ArgumentError("f", ["no"])


def _reads_beyond_strides(state, x, out, **rest):
    dense = x.as_strided(x.shape, torch.empty(x.shape).stride())
    return ssmgen.selective_state_update(state, dense, out=out, **rest)


def _writes_around(state, out, **rest):
    result = ssmgen.selective_state_update(state, out=out, **rest)
    torch.empty(0).set_(out.untyped_storage())[-1] = 7.0
    return result


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (_raises, "raw: IndexError"),
        (_changes_an_input, "changed: x"),
        (_changes_and_raises, "changed: state"),
        (_reads_beyond_strides, "different"),
        (_writes_around, "changed: around"),
    ],
)
def test_the_law_is_enforced(function, how):
    (form,) = [f for f in forms() if f.id == "selective_state_update-mamba1"]
    given = fuzz.with_own_memory(form.arguments)
    given |= {"x": given["x"].t().contiguous().t(), "out": torch.zeros(3, 8)[:2]}
    report = fuzz.Report()
    fuzz.run(fuzz.Case(replace(form, function=function, public=False), given, ["planted"]), report)
    assert [b.how.startswith(how) for b in report.broken] == [True], report.broken
