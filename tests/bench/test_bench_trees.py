"""Draft trees in the benchmarks: the same tokens with and without one, checked alike."""

from __future__ import annotations

import pytest
import torch
from bench_cases import broken, small_run, without_a_gpu
from selection import costly
from test_bench import case_of
from test_bench_conv import update_case

import ssmgen
from ssmgen.bench import case, rows, table
from ssmgen.bench.suite import Suite
from ssmgen.errors import SsmgenError
from ssmgen.families.linear_attention import bench

pytestmark = pytest.mark.usefixtures("one_compile")


def test_every_token_has_two_children():
    assert case.binary_tree(2, 8, "cpu").tolist() == [[-1, 0, 0, 1, 1, 2, 2, 3]] * 2


TREES = {"delta": lambda: case_of(tokens=6, tree=True), "conv": lambda: update_case(tokens=6, tree=True, dtype=torch.float32)}


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_trees_pass_the_gate_and_are_no_chains(make):
    case = make()
    case.gate()
    tree, call = case.arguments(1), case.arguments(1)
    assert ssmgen.supported(case.function, **tree, arch="sm_90a") == (True, [])
    state = call["state" if "state" in call else "conv_state"]
    before = state.clone()
    found = case.function(**tree).clone()
    del call["parents"]
    state.copy_(before)
    chain = case.function(**call)
    tokens = 1 if case.function.__name__ == "gated_delta_rule" else 2
    same = [torch.equal(a, b) for a, b in zip(found.unbind(tokens), chain.unbind(tokens), strict=True)]
    assert same == [True, True, *[False] * 4], "the first token's first child is the next one"


def test_the_gate_sees_a_tree_that_is_not_followed():
    case = case_of(tokens=6, tree=True)
    broken(case, lambda call: None, lambda call: {n: t for n, t in call.items() if n != "parents"})
    with pytest.raises(SsmgenError, match="not timed"):
        case.gate()


@costly(1)
@pytest.mark.parametrize(("op", "tokens"), [("gated_delta_rule", 4), ("kda", 4), ("causal_conv1d_update", 4)])
def test_a_tree_is_timed_beside_its_chain(op, tokens, monkeypatch):
    without_a_gpu(monkeypatch)
    found = small_run(op, tokens=(tokens,), tree=True)
    assert not found["failed"] and found["tree"]
    for row in found["rows"]:
        assert row["us"]["chain"] == 4.0 and row["peer_ratio"]["chain"] == 0.5
    assert all("a draft tree" in row.case for row in rows.rows_of(found))
    assert "chain us" in table.as_text(Suite([found])) and "chain us" not in table.as_text(Suite([small_run(op, peers=False)]))


def test_nothing_else_is_timed_beside_a_tree():
    tree, plain = case_of(tokens=3, tree=True), case_of(tokens=3)
    assert bench.flashinfer(tree) is bench.fla(tree) is None and case.without_tree(plain) is None
    assert case.without_tree(update_case(tokens=3)) is None and case.without_tree(tree) is not None
