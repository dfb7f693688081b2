"""Draft trees in the benchmarks: the same tokens with and without one, checked alike."""

from __future__ import annotations

import pytest
import torch
from bench_cases import small_run, without_a_gpu
from click.testing import CliRunner
from test_bench import case_of

import ssmgen
from ssmgen import cli
from ssmgen.bench import bench_of, report, rows
from ssmgen.errors import SsmgenError
from ssmgen.families.causal_conv1d_update import bench as update
from ssmgen.families.linear_attention import bench

pytestmark = pytest.mark.usefixtures("one_compile")


def update_case(tokens: int, tree: bool = True) -> update.Case:
    torch.manual_seed(0)
    return update.Case(torch.randn(24, 16, 2 + tokens), update.Innermost.WINDOW, 5, tokens, tree=tree)


def test_every_token_has_two_children():
    assert report.binary_tree(2, 8, "cpu").tolist() == [[-1, 0, 0, 1, 1, 2, 2, 3]] * 2


TREES = {"delta": lambda: case_of(tokens=6, intermediates=True, tree=True), "conv": lambda: update_case(6)}


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_trees_pass_the_gate_and_are_no_chains(make):
    case = make()
    case.gate()
    tree, call = case.arguments(1), case.arguments(1)
    assert ssmgen.supported(case.function, **tree, arch="sm_90a") == (True, [])
    before = case.state.clone()
    found = case.function(**tree).clone()
    del call["parents"]
    case.state.copy_(before)
    chain = case.function(**call)
    tokens = 1 if case.function.__name__ == "gated_delta_rule" else 2
    same = [torch.equal(a, b) for a, b in zip(found.unbind(tokens), chain.unbind(tokens), strict=True)]
    assert same == [True, True, *[False] * 4], "the first token's first child is the next one"


def test_the_gate_sees_a_tree_that_is_not_followed(monkeypatch):
    case = case_of(tokens=6, intermediates=True, tree=True)

    def wrong(parents, **call):
        ssmgen.gated_delta_rule(**call)

    wrong.build = ssmgen.gated_delta_rule.build
    monkeypatch.setattr(bench.Case, "function", property(lambda _: wrong))
    with pytest.raises(SsmgenError, match="not timed"):
        case.gate()


@pytest.mark.parametrize(("op", "tokens"), [("gated_delta_rule", 4), ("kda", 4), ("causal_conv1d_update", 4)])
def test_a_tree_is_timed_beside_its_chain(op, tokens, monkeypatch):
    without_a_gpu(monkeypatch)
    found = small_run(op, tokens=(tokens,), tree=True)
    assert not found["failed"] and found["tree"]
    for row in found["rows"]:
        assert row["us"]["chain"] == 4.0 and row["peer_ratio"]["chain"] == 0.5
    assert all("a draft tree" in row.case for row in rows.rows_of(found))
    (heading,) = [line for line in bench_of(op).table(found).splitlines() if line.endswith("rule")]
    assert "chain" in heading and "chain" not in bench_of(op).table(small_run(op))


def test_nothing_else_is_timed_beside_a_tree():
    case = case_of(tokens=3, intermediates=True, tree=True)
    assert bench.flashinfer(case) is bench.fla(case) is None and bench.chain(case_of(tokens=3)) is None
    assert update.chain(update_case(3, tree=False)) is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gated_delta_rule", "--tree"], "--tree needs --tokens"),
        (["kda", "--tree", "--tokens", "4", "--ring"], "--tree keeps every token's state"),
        (["gated_delta_rule", "--tree", "--tokens", "4", "--no-intermediates"], "--tree keeps every token's state"),
        (["gated_delta_rule", "--tree", "--tokens", "4", "--pool-mode", "split"], "--tree keeps every token's state"),
        (["causal_conv1d_update", "--tree", "--tokens", "1"], "--tree needs --tokens"),
    ],
)
def test_options_that_do_not_go_together_are_usage_errors(args, message):
    result = CliRunner().invoke(cli.main, ["bench", *args])
    assert result.exit_code == 2 and message in result.output
