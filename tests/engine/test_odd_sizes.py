"""Rows of any length: the emulated kernels obey the laws of all other sizes, and memory past a row's end is not touched."""

from __future__ import annotations

import random
from dataclasses import replace

import decode_cases
import la_cases
import odd_sizes
import pytest
import test_ring as rings
import torch
from emulated_calls import SM90, emulate, needs_emulator
from selection import costly
from subjects import is_accurate

import ssmgen
from ssmgen.families.linear_attention.spec import space

pytestmark = pytest.mark.usefixtures("one_thread")


@costly(16)
@needs_emulator
@pytest.mark.parametrize(("operator", "case"), odd_sizes.CASES, ids=odd_sizes.IDS)
def test_results_are_within_their_bounds(operator, case):
    is_accurate(operator, case, "cpu", emulate)


@costly(1)
@needs_emulator
@pytest.mark.parametrize("case", [odd_sizes.LINEAR, next(c for c in odd_sizes.linear() if c.id == "gdn-kv-k66v35")], ids=lambda c: c.id)
def test_variants_are_bit_equal(case):
    """All have one lane map; rows in flight and in a block differ, by the rules and as drawn."""
    case = replace(case, K=35, index=None)
    specs = list(space(la_cases.make_call(case, "cpu").problem, SM90))
    random.Random(1).shuffle(specs)
    assert specs and len({(s.lanes, s.vec) for s in specs}) == 1
    specs = [None, *{(s.ilp, s.tile > s.rows_per_step): s for s in specs}.values()][:4]
    decode_cases.variants_are_equal(la_cases, case, specs)


@needs_emulator
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_rings(name, monkeypatch):
    monkeypatch.setattr(rings, "K", 6)
    monkeypatch.setattr(rings, "V", 9)
    for law in (rings.test_a_step_keeps_its_inputs_and_leaves_the_state, rings.test_a_commit_is_the_update_by_the_accepted_tokens):
        law(name, torch.bfloat16, {}, rings.emulated)


def test_a_row_of_a_single_element_is_a_product():
    """A delta rule with one key channel and a step of 1 writes a state that returns v."""
    v = torch.tensor([[[3.0]], [[-5.0]]])
    state = torch.zeros(2, 1, 1, 1)
    one = torch.ones(2, 1, 1)
    out = ssmgen.delta_rule(state, one, one, v, one[..., 0], scale=1.0)
    assert torch.equal(out, v) and torch.equal(state, v[..., None])
