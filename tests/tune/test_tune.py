"""Tuning without a GPU: the table, its use by the registry, the cost model, the cases, and the search with replaced measurements."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from ssmgen.cache.store import Cache
from ssmgen.cli import main
from ssmgen.compile import render
from ssmgen.errors import SsmgenError
from ssmgen.families.selective_state_update.spec import SsuProblem
from ssmgen.launch import runtime
from ssmgen.select import registry
from ssmgen.select import tuned as table
from ssmgen.select.catalog import OPERATOR_OF, OPERATORS
from ssmgen.select.model_variants import problems_by_models, specs_for
from ssmgen.select.models import find_model
from ssmgen.spec.kernel import SM90, Arch, DType, Index, Loads, Pdl, PoolMode
from ssmgen.tune import cases, model, search
from ssmgen.variants.build import build

GPU, OP = "Test GPU 7", "selective_state_update"
PROBLEM = find_model("nemotron-h-8b").problem(DType.BF16, Index.I32, PoolMode.SINGLE)
RULE = registry.select(OP, PROBLEM, 8, SM90, True)
OTHER = next(s for s in OPERATORS[OP].space(PROBLEM, SM90) if s.pdl is Pdl.WAIT and s.tile != RULE.tile)
CARD = model.Card(SM90, 132, 4.2)


def row(spec=OTHER, size=8, problem=PROBLEM, **changes) -> table.Row:
    given = {
        "operator": OP, "problem": table.bucket(problem), "size": size, "pdl": True, "spec": str(spec), "us": 2.0, "rule_us": 2.5,
        "runner_up": search.difference(spec, RULE), "runner_up_us": 2.5, "label": "a case", "arch": "sm_90a", "driver": "CUDA 13.0",
        "code": table.code_digest(spec, SM90), "compiler": "a build", "date": "2026-01-02",
    }  # fmt: skip
    return table.Row(**given | changes)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Only the tables that a test writes exist."""
    monkeypatch.setenv("SSMGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    registry.forget()
    yield tmp_path
    registry.forget()


def ship(*rows: table.Row) -> None:
    table.write(table.SHIPPED / table.file_name(GPU), GPU, rows)
    registry.forget()


def overlay(*rows: table.Row) -> None:
    table.write(table.overlay_path(GPU), GPU, rows)
    registry.forget()


# The table.


def test_a_table_is_read_as_it_was_written():
    rows = [row(size=n, us=1 / 3 * n) for n in (64, 1, 8)]
    ship(*rows)
    assert table.rows_of(GPU) == {r.key: r for r in rows} and table.gpus() == (GPU,) and table.gpus(Arch.parse("sm_80")) == ()
    lines = (table.SHIPPED / "Test_GPU_7.json").read_text().splitlines()
    assert [json.loads(line.rstrip(","))["size"] for line in lines[1:-1]] == [1, 8, 64]  # a row to a line
    assert not list(table.SHIPPED.glob(".tuned-*"))


def test_a_bucket_is_what_choices_depend_on():
    same = [replace(PROBLEM, index=Index.NONE), replace(PROBLEM, index=Index.I64), replace(PROBLEM, A=DType.BF16, D=DType.F32)]
    assert {table.bucket(p) for p in same} == {table.bucket(PROBLEM)}
    others = [{"nheads": 64}, {"state": DType.F32}, {"x": DType.F32}, {"z": DType.BF16}, {"D": None}, {"state_loads": Loads.ELEMENT}]
    assert len({table.bucket(replace(PROBLEM, **o)) for o in others} | {table.bucket(PROBLEM)}) == len(others) + 1


def test_the_users_rows_lie_over_the_packages():
    ship(row(), row(size=64))
    overlay(row(spec=RULE, us=1.0))
    assert {size: r.us for (*_, size), r in table.rows_of(GPU).items()} == {8: 1.0, 64: 2.0}


@pytest.mark.parametrize("text", ["{", '{"schema": 0, "rows": []}', '{"schema": 1, "rows": [{"operator": "x"}]}', "[]"])
def test_a_damaged_table_of_the_user_is_left_out_with_a_warning(text):
    ship(row())
    path = table.overlay_path(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(UserWarning, match="is not a table of tuned variants"):
        assert len(table.rows_of(GPU)) == 1
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        assert len(table.rows_of(GPU)) == 1 and table.gpus() == (GPU,)
    registry.forget()
    with pytest.warns(UserWarning, match="is not a table of tuned variants"):
        assert table.gpus() == (GPU,) and table.gpus(SM90) == (GPU,)
    with pytest.raises(table.TableError, match="Remove it, or tune again"):
        table.read(path)


def test_a_table_that_everyone_may_write_is_left_out():
    overlay(row())
    table.overlay_path(GPU).parent.chmod(0o777)
    with pytest.warns(UserWarning, match="writable by everyone"):
        assert table.rows_of(GPU) == {}


def test_the_tables_of_the_package_are_sound(monkeypatch):
    monkeypatch.undo()
    registry.forget()
    for gpu in table.gpus():
        rows = table.read(table.SHIPPED / table.file_name(gpu)).values()
        reasons = [table.staleness(r) for r in rows]
        assert 2 * reasons.count("") >= len(reasons), f"{gpu}: most rows are stale, so that the table is of little use: tune again"
        for r, stale in zip(rows, reasons, strict=True):
            if not stale:
                spec = table.parse(r.spec)
                assert not spec.violations(Arch.parse(r.arch)) and r.us <= r.rule_us and (spec.pdl is not Pdl.OFF) == r.pdl, r.label
            assert not stale or "code" in stale or "no more" in stale


def test_a_digest_is_of_code(monkeypatch):
    digest = render.code_digest.__wrapped__
    want, text = digest(OTHER, SM90), render.render(OTHER, SM90)
    assert want != digest(RULE, SM90)
    for changed, same in (
        (text.replace(OTHER.name, "other_name"), False),  # only its own name is left out
        (text.replace("\n", "  // more words\n\n"), True),
        (text.replace("fmaf(", "fma(", 1), False),
    ):
        monkeypatch.setattr(render, "render", lambda spec, arch, changed=changed: changed)
        assert (digest(OTHER, SM90) == want) is same


@pytest.mark.matrix
@pytest.mark.parametrize("share", range(2))  # of 12 s each, for workers to divide
def test_no_variant_of_the_packages_tables_spills(monkeypatch, share):
    """Under this compiler, with the widest slot index, which takes the most registers; a row that does is taken out."""
    monkeypatch.undo()
    registry.forget()
    rows = [r for gpu in table.gpus() for r in table.read(table.SHIPPED / table.file_name(gpu)).values() if not table.staleness(r)]
    work = {}
    for r in rows:
        arch, measured = Arch.parse(r.arch), table.parse(r.spec)
        widest = [s for s in table.alike(measured) if getattr(s, "index", None) is Index.I64 and not s.violations(arch)]
        work |= {(part, arch): r.label for s in widest or [measured] for part in s.kernels}
    assert len(work) > 100
    failed = [f"{work[b.spec, b.arch]}: {b.error}" for b in build(list(work)[share::2], Cache.from_environment()) if b.error]
    assert not failed, "\n".join(failed)


# The registry's use of the table.


def chosen(size: int, gpu: str | None = GPU, pdl: bool = True, problem=PROBLEM):
    return registry.explain(OP, problem, size, SM90, pdl, gpu).chosen


def test_an_exact_row_then_the_nearest_then_the_rules():
    near = replace(OTHER, pdl=Pdl.TRIGGER_TOP)
    ship(row(), row(spec=near, size=64))
    assert (chosen(8).rule, chosen(8).spec) == ("tuned", OTHER)
    assert (chosen(16).rule, chosen(16).spec) == ("tuned at batch 8", OTHER)
    assert (chosen(48).rule, chosen(48).spec) == ("tuned at batch 64", near)
    for size, gpu, pdl in ((1, GPU, True), (512, GPU, True), (8, None, True), (8, "another", True), (8, GPU, False)):
        assert chosen(size, gpu, pdl).spec == registry.select(OP, PROBLEM, size, SM90, pdl), (size, gpu, pdl)


def test_a_row_serves_every_problem_of_its_bucket():
    ship(row())
    for problem in (replace(PROBLEM, index=Index.I64), replace(PROBLEM, index=Index.NONE, dt_bias=DType.F32)):
        spec = chosen(8, problem=problem).spec
        assert spec == replace(OTHER, index=problem.index, dt_bias=problem.dt_bias)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"code": "another"}, "the variant's code has changed since 2026-01-02"),
        ({"arch": "sm_80"}, "it is for sm_80"),
        ({"spec": str(OTHER).replace("tile=", "tilt=")}, "its variant no longer exists:"),
        ({"spec": str(replace(OTHER, tile=OTHER.tile * 64))}, "expected at most the 64 rows of a head"),
    ],
)
def test_a_row_that_is_not_believed_is_said_and_passed_over(changes, words):
    ship(replace(row(), **changes), row(size=16))
    found = registry.explain(OP, PROBLEM, 8, SM90, True, GPU)
    assert found.verdicts[0].rule == "tuned" and words in found.verdicts[0].reason and words in str(found)
    assert found.chosen.rule == "tuned at batch 16"


def test_stale_rows_are_listed_as_such():
    ship(row(code="another"), row(size=16))
    result = CliRunner().invoke(main, ["tuned"])
    assert (
        result.exit_code == 0
        and "STALE: the variant's code has changed since 2026-01-02" in result.output
        and "2 rows, 1 stale" in result.output
    )


def test_what_the_rules_lose_is_listed():
    chosen_by_now = registry.select(OP, PROBLEM, 16, SM90, True)
    lost, little = row(us=2.0, rule_us=2.5), row(size=32, us=2.0, rule_us=2.02)
    ship(lost, little, replace(row(spec=chosen_by_now, us=2.0, rule_us=2.5), size=16), row(size=64, code="old"))
    result = CliRunner().invoke(main, ["tuned", "--lost", "3"])
    listed = [line for line in result.stdout.splitlines() if line]
    assert result.exit_code == 1 and len(listed) == 1, "neither what the rules choose by now, nor little, nor what is stale"
    assert "25.0 %" in listed[0] and f"tile={OTHER.tile} (rules {RULE.tile})" in listed[0] and "headdim" not in listed[0]
    assert "4 rows, 1 stale; the rules lose 8.67 % in the mean, 25.0 % at most (a case)" in result.stderr
    told = json.loads(CliRunner().invoke(main, ["tuned", "--json"]).stdout)
    assert [r["lost"] for r in told] == [0.25, 0.0, pytest.approx(0.01), None]
    assert CliRunner().invoke(main, ["tuned", "--lost", "30"]).exit_code == 0


def test_what_is_tuned_is_built():
    ship(row())
    without, both = (specs_for([PROBLEM], SM90, (True,), gpus=gpus) for gpus in ((None,), (None, GPU)))
    assert OTHER not in without and set(both) == {*without, OTHER}
    result = CliRunner().invoke(main, ["explain", OP, "--model", "nemotron-h-8b", "--state", "bf16", "--batch", "8", "--gpu", GPU])
    assert "-> tuned" in result.output and GPU in result.output


# The search, with replaced measurements of a card.


class FakeCall:
    def __init__(self, size: int):
        self.size = size

    def problem(self):
        return PROBLEM, self.size, None, True


class Card:
    """Replaces a GPU: times by tile."""

    def __init__(self, monkeypatch):
        self.timed, self.checked, self.wrong, self.spilling = [], [], set(), set()
        monkeypatch.setattr(search, "_promising", lambda call, rule, bench, pdl: [OTHER])
        monkeypatch.setattr(search, "check_bits", self.equal)
        monkeypatch.setattr(search, "_never_spills", lambda spec, bench: spec not in self.spilling)
        monkeypatch.setattr(search, "_times", self.times)
        self.us = {OTHER: 2.0, RULE: 3.0}
        self.bench = search.Bench(GPU, CARD, "CUDA 13.0", "a build")

    def equal(self, call, rule, specs):
        self.checked.append(list(specs))
        if call.size in self.wrong:
            raise SsmgenError("out of them differ\nmore")

    def times(self, calls, sets, specs, rounds, captures):
        self.timed.append(calls[0].size)
        return {spec: self.us.get(spec, self.us[RULE]) for spec in specs}

    def tune(self, *sizes, gate=lambda: None, **how):
        work = (cases.Case(f"size {n}", 2, lambda i, n=n: FakeCall(n), gate) for n in sizes)
        return search.tune(self.bench, work, table.overlay_path(GPU), **how)


@pytest.fixture
def card(monkeypatch) -> Card:
    return Card(monkeypatch)


def test_the_fastest_is_kept_and_served(card):
    (outcome,) = card.tune(8)
    r = outcome.row
    assert (r.spec, r.us, r.rule_us, r.runner_up, r.runner_up_us) == (str(OTHER), 2.0, 3.0, search.difference(OTHER, RULE), 3.0)
    assert f"tile={RULE.tile}," in r.runner_up and "headdim" not in r.runner_up
    assert chosen(8).rule == "tuned" and chosen(8).spec == OTHER


def test_what_the_gate_saw_is_among_what_is_compared(card):
    """If the table has a row, its variant is served and gated instead of the rules' choice."""
    card.tune(8)
    card.tune(8, again=True)
    assert card.checked == [[OTHER, RULE], [OTHER, OTHER]]


class Wrote:
    """A call on a CPU, and variants that leave such values in its output and add such to its state."""

    def __init__(self, **variants: tuple[float | None, float]):
        self.out, self.state, self.variants = torch.full((4,), 3.0), torch.full((4,), 10.0), variants
        self.operands = {"state": self.state, "x": torch.zeros(4), "out": self.out}
        self.caller = SimpleNamespace(family=SimpleNamespace(written=("out", "state")))
        self.pointers = ()

    def launch_with(self, spec):
        out, more = self.variants[spec]

        def run():
            self.state.add_(more)
            if out is not None:
                self.out.fill_(out)

        return SimpleNamespace(at=lambda pointers: run)


def test_bits_are_compared_of_all_that_is_written():
    call = Wrote(rule=(3.0, 1.0), same=(3.0, 1.0), silent=(None, 1.0), state=(3.0, 2.0), out=(3.0000002, 1.0))
    search.check_bits(call, "rule", ["same", "rule", "same"])
    for wrong, what in (("silent", "out"), ("state", "state"), ("out", "out")):  # the right output is there already
        with pytest.raises(SsmgenError, match=f"^{what} of {wrong} differ from those of rule"):
            search.check_bits(Wrote(**call.variants), "rule", ["same", wrong])
    assert call.out.tolist() == [3.0] * 4 and call.state.tolist() == [10.0] * 4  # as it was


def test_what_is_hardly_faster_is_noise(card):
    card.us[OTHER] = 0.99 * card.us[RULE]
    (outcome,) = card.tune(8)
    assert outcome.row.spec == str(RULE) and outcome.row.runner_up == search.difference(RULE, OTHER)


def test_what_spills_elsewhere_is_not_kept(card):
    card.spilling = {OTHER}
    (outcome,) = card.tune(8)
    assert outcome.row.spec == str(RULE)


def test_known_cases_are_skipped_unless_asked_for_or_stale(card):
    card.tune(8)
    assert [o.why for o in card.tune(8, 64)] == ["known", ""] and card.timed == [8, 8, 64, 64]
    card.tune(8, again=True)
    rows = table.read(table.overlay_path(GPU))
    overlay(*(replace(r, code="old") for r in rows.values()))
    assert [o.why for o in card.tune(8)] == [""]


def test_an_interrupt_loses_the_case_at_hand(card):
    def gate():
        if len(card.timed) >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        card.tune(1, 8, 64, gate=gate)
    assert sorted(size for *_, size in table.read(table.overlay_path(GPU))) == [1, 8]
    assert [o.why for o in card.tune(1, 8, 64)] == ["known", "known", ""]


def test_a_budget_ends_it_between_cases(card):
    assert card.tune(1, 8, budget=-1.0) == [] and len(card.tune(1, 8, budget=60.0)) == 2


def test_a_variant_that_is_wrong_leaves_no_row(card):
    card.wrong = {8}
    outcomes = card.tune(1, 8, 64)
    assert [o.row is None for o in outcomes] == [False, True, False] and outcomes[1].why.startswith("out of them differ")
    assert sorted(size for *_, size in table.read(table.overlay_path(GPU))) == [1, 64]


def test_the_command(card, monkeypatch):
    monkeypatch.setattr(search.Bench, "here", classmethod(lambda cls: card.bench))
    monkeypatch.setattr(
        cases, "cases", lambda *args: (cases.Case(f"size {n}", 1, lambda i, n=n: FakeCall(n), lambda: None) for n in (1, 8))
    )
    result = CliRunner().invoke(main, ["tune", OP, "--budget", "2m", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert [r["size"] for r in said["rows"]] == [1, 8] and said["failed"] == [] and said["gpu"] == GPU
    assert "2 of 2 better than the rules, 1.500 x" in CliRunner().invoke(main, ["tune", OP]).output
    card.wrong = {8}
    failed = CliRunner().invoke(main, ["tune", OP, "--again"])
    assert failed.exit_code == 1 and "size 8: out of them differ" in failed.output
    listed = CliRunner().invoke(main, ["tuned", "--json"])
    assert [r["label"] for r in json.loads(listed.stdout)] == ["size 1", "size 8"]
    assert CliRunner().invoke(main, ["tune", OP, "--budget", "soon"]).exit_code == 2


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(search.torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["tune", OP])
    assert result.exit_code == 1 and "torch finds no CUDA device; tune needs one" in result.output
    assert runtime.name_of_gpu(SM90) is None


def test_models_pose_problems_that_some_row_could_serve():
    """A bucket must keep every field that a variant's legality depends on: a variant legal for one of its problems is legal for all."""
    buckets: dict[str, list] = {}
    for problem in problems_by_models():
        buckets.setdefault(f"{type(problem).__name__} {table.bucket(problem)}", []).append(problem)
    several = [group for group in buckets.values() if len(group) > 1]
    assert several
    for group in several:
        operator = OPERATOR_OF[type(group[0])]
        first = registry.select(operator, group[0], 64, SM90, True)
        for problem in group[1:]:
            moved = replace(first, **{f: getattr(problem, f) for f in problem.__dataclass_fields__})
            assert not moved.violations(SM90)
    assert isinstance(PROBLEM, SsuProblem)
