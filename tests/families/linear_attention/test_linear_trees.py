"""Draft trees of the delta rules without a GPU: the reference, emulated kernels, laws, errors, registration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import decode_cases as laws
import la_cases as of
import pytest
import torch
from compiled import compiled
from emulated_calls import SM80, chosen, emulate, needs_emulator
from la_cases import GDN, I32, make_call
from la_trees import DRAWS, LAWS, Draw, cases
from selection import costly, few
from test_linear_attention import PROBLEM, SM90, bad
from varying import named

import ssmgen
from ssmgen.compile.render import render
from ssmgen.emulator.check import check
from ssmgen.engine.recurrences.attention.problem import Tokens
from ssmgen.families.linear_attention.spec import space
from ssmgen.spec.kernel import DType, Index

pytestmark = pytest.mark.usefixtures("one_thread")
BY_NAME = {c.id: c for c in cases()}


@named(*cases())
def test_reference_is_within_rounding_of_float64(case):
    laws.is_within_rounding(of, case, lambda call: call.run(), any_order=True)


@needs_emulator
@named(*few(cases()))
def test_kernels_are_within_rounding_of_float64(case):
    laws.is_within_rounding(of, case, lambda call: emulate(call, arch=SM80 if case.id == "gdn-rows" else SM90))


def run(function: Any, **kwargs: Any) -> None:
    """A call by its emulated kernel."""
    emulate(function.build(**kwargs))


@costly(3)
@needs_emulator
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("draw", DRAWS[:4], ids=lambda d: f"{d[0]}-{d[1]}-{d[2]}".replace("torch.", ""))
def test_laws(law, draw):
    rule, state, layout = draw
    law(run, Draw(rule, "cpu", state, layout))


@costly(1)
@needs_emulator
@pytest.mark.parametrize("name", ["gdn-bf16", "gdn-bf16-kv"])
def test_variants_are_bit_equal(name):
    specs = laws.lane_maps(space(make_call(BY_NAME[name], "cpu").problem, SM90), 4, seed=2)
    laws.variants_are_equal(of, BY_NAME[name], specs)


# Errors.

KEPT, PARENTS = torch.zeros(5, 3, 4, 64, 128), torch.zeros(5, 3, dtype=I32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parents": PARENTS}, "parents is given without intermediate_states"),
        ({"intermediate_state_indices": PARENTS[:, 0]}, "intermediate_state_indices is given without intermediate_states; expected both"),
        ({"parents": PARENTS[:, :2], "intermediate_states": KEPT}, "parents is [5, 2]; expected [batch, tokens] = [5, 3]"),
        ({"parents": PARENTS[0], "intermediate_states": KEPT}, "parents is [3]; expected [batch, tokens] = [5, 3]"),
        ({"parents": PARENTS.float(), "intermediate_states": KEPT}, "parents is torch.float32; expected int32 or int64"),
        (
            {"intermediate_state_indices": PARENTS, "intermediate_states": KEPT},
            "intermediate_state_indices is [5, 3]; expected [batch] = [5]",
        ),
        (
            {"intermediate_state_indices": PARENTS[:, 0], "intermediate_states": KEPT[:, :2]},
            "intermediate_states is [5, 2, 4, 64, 128]; expected [rows, tokens or more, heads, V, K] = [5, 3, 4, 64, 128]",
        ),
    ],
)
def test_bad_input(change, words):
    assert words in bad(change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parents": Index.I32}, "parents is set without intermediate states; expected a buffer of intermediate states"),
        ({"kept_index": Index.I64}, "the rows of intermediate states have indices, and there are no intermediate states"),
    ],
)
def test_faults_of_a_problem(change, words):
    problem = replace(PROBLEM, tokens=Tokens.MANY)
    assert not problem.faults() and any(words in fault for fault in replace(problem, **change).faults())


# Text, machine code, registration.


def test_what_is_switched_off_is_not_in_the_text():
    call = make_call(replace(GDN, tokens=4, kept=0), "cpu")
    text = render(chosen(call), SM90)
    assert "parent" not in text and "kept_row" not in text and "intermediate_state_indices" not in text


@pytest.mark.parametrize("name", ["gdn-bf16", "kda-bf16", "ragged-few-kv"])
def test_nothing_spills(name):
    spec = chosen(make_call(BY_NAME[name], "cpu"))
    assert not compiled(spec, SM90).resources.spills


def test_explain_without_a_gpu():
    call = make_call(BY_NAME["gdn-rows"], "cpu")
    spec = ssmgen.explain(call.function, **call.kwargs, arch="sm_90a").chosen.spec
    assert (spec.parents, spec.kept_index, spec.state) == (Index.I64, Index.I32, DType.F32)


@needs_emulator
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_lightning_attention_keeps_states_in_rows(layout):
    """Its kernel is checked against float64; no tree, but the same rows."""
    state, tokens = torch.zeros(5, 2, 32, 32), [torch.zeros(3, 4, 2, 32, dtype=torch.bfloat16) for _ in range(3)]
    index = torch.arange(3, dtype=I32)
    kept = {"intermediate_states": torch.zeros(6, 4, 2, 32, 32), "intermediate_state_indices": index, "update_state": False}
    how = {"state_layout": layout, "state_indices": index, **kept}
    spec = ssmgen.explain(ssmgen.lightning_attn, state, *tokens, torch.ones(2), **how, arch="sm_90a").chosen.spec
    assert spec.kept_index is Index.I32
    outcome = check(spec, SM90, batch=4)
    assert outcome.passed, outcome


# Kernels, each broken by one edit, which the check must catch.

EDITS = {
    "no parents": ("gdn-f32", "parent >= 0) {", "parent >= 99) {", "off by"),
    "later parents": ("gdn-f32", "u64(chunk.parent) < earlier ?", "chunk.parent >= 0 ?", "load outside of every operand"),
    "parents in other columns": ("ragged-f32", "t < parent_columns ? ", "true ? ", "off by"),
    "rows that are not there": ("gdn-rows", "!keeps", "false", "changed outside what the call may write"),
    "kept in its own row": ("gdn-rows", "(keeps ? kept_row : 0)", "batch", "changed outside what the call may write"),
}


@needs_emulator
@pytest.mark.parametrize("edit", EDITS)
def test_broken_template(edit):
    name, *edit = EDITS[edit]
    laws.a_mistake_is_found(of, BY_NAME[name], tuple(edit))
