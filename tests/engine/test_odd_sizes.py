"""Rows of any length: the emulated kernels obey the laws of all other sizes, and memory past a row's end is not touched."""

from __future__ import annotations

import random
from dataclasses import replace

import combine_cases
import decode_cases
import la_cases
import narrow_cases
import norm_cases
import odd_sizes
import pytest
import ssu_cases
import ssu_token_cases
import test_ring as rings
import torch
from emulated_calls import emulate
from selection import costly
from test_emulator import emulate as emulate_mamba
from test_emulator import select

import ssmgen
from ssmgen import emulator
from ssmgen.families.linear_attention.spec import space
from ssmgen.spec.kernel import Arch

SM90 = Arch.parse("sm_90a")
emulated = pytest.mark.skipif(not emulator.available(), reason="needs g++")
pytestmark = pytest.mark.usefixtures("one_thread")


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.id)


@costly(4)
@emulated
@named(odd_sizes.linear())
def test_linear_attention(case):
    call = la_cases.make_call(case, "cpu")
    want = la_cases.expected(call)
    emulate(call)
    decode_cases.assert_matches(call, want)


@costly(4)
@emulated
@named(odd_sizes.mamba())
def test_selective_state_update(case):
    call = ssu_cases.make_call(case, "cpu")
    want = ssu_cases.expected(call)
    emulate_mamba(call, select(call))
    ssu_cases.assert_matches(call, want)


@emulated
@named(odd_sizes.mamba_tokens())
def test_selective_state_update_of_several_tokens(case):
    call = ssu_token_cases.make_call(case, "cpu")
    want = ssu_token_cases.expected(call)
    emulate(call)
    ssu_token_cases.assert_matches(call, want)


@emulated
@named(odd_sizes.narrow())
def test_states_in_fewer_bits(case):
    call = narrow_cases.Call(case)
    emulate(call)
    narrow_cases.assert_matches(call)


@emulated
@named(odd_sizes.norms())
def test_gated_rms_norm(case):
    call = norm_cases.make(case, "cpu")
    want = norm_cases.expected(call)
    emulate(call)
    norm_cases.assert_matches(call, want)


@emulated
@named(odd_sizes.splits())
def test_combine_splits(case):
    call = combine_cases.make(case, "cpu")
    want = combine_cases.expected(call)
    emulate(call)
    combine_cases.assert_matches(call, want)


@costly(1)
@emulated
@named([odd_sizes.LINEAR, next(c for c in odd_sizes.linear() if c.id == "gdn-kv-k66v35")])
def test_variants_are_bit_equal(case):
    """All have one lane map; rows in flight and in a block differ, by the rules and as drawn."""
    case = replace(case, K=35, index=None)
    specs = list(space(la_cases.make_call(case, "cpu").problem, SM90))
    random.Random(1).shuffle(specs)
    assert specs and len({(s.lanes, s.vec) for s in specs}) == 1
    results = []
    for spec in [None, *{(s.ilp, s.tile > s.rows_per_step): s for s in specs}.values()][:4]:
        call = la_cases.make_call(case, "cpu")
        emulate(call, spec)
        results.append((narrow_cases.bits(call.kwargs["state"]), narrow_cases.bits(call.kwargs["out"])))
        assert all(map(torch.equal, results[-1], results[0])), spec


@emulated
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
