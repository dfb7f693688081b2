"""CI's steps and the documentation's measurements, as far as they can be looked at without running them."""

from __future__ import annotations

import contextlib
import gzip
import json
import shlex
import subprocess
import sys

import click
import pytest
from docs_pages import ROOT

from ssmgen.bench.formats import load
from ssmgen.cli import main
from tools import cards, ci, measure
from tools.demo.__main__ import demo


def call(monkeypatch, *steps: str, fails: str = "") -> list[str]:
    """The steps that a command begins, in their order. fails: the step that does."""
    began = []

    def process(name, captured):
        began.append(name)
        assert captured == (name != "tests")
        return int(name == fails), ""

    monkeypatch.setattr(ci, "_process", process)
    monkeypatch.setattr(sys, "argv", ["ci", *steps])
    with pytest.raises(SystemExit, match=f"{fails} failed") if fails else contextlib.nullcontext():
        ci.main()
    return began


def test_one_step_runs_here(monkeypatch):
    ran = []
    monkeypatch.setattr(ci, "STEPS", {name: lambda name=name: ran.append(name) for name in ci.STEPS})
    assert call(monkeypatch, "docs") == [] and ran == ["docs"]


def test_steps_that_install_run_before_the_others(monkeypatch):
    assert set(call(monkeypatch, "lint", "types")) == {"lint", "types"}
    usual = [name for name in ci.STEPS if name not in ci.ON_REQUEST]
    began = call(monkeypatch)
    assert began[0] == "tests" and {*began[1:4]} == {"docs", "types", "lint"}
    assert sorted(began) == sorted(usual) and len(usual) == len(ci.STEPS) - len(ci.ON_REQUEST)


def test_unknown_steps_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ci", "lint", "paint"])
    with pytest.raises(SystemExit) as refused:
        ci.main()
    assert refused.value.code == 2 and "no step is called paint" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "at_most"), [("tests", {"tests"}), ("docs", {"tests", "docs", "types", "lint"})])
def test_no_step_begins_after_a_failure(name, at_most, monkeypatch):
    began = call(monkeypatch, fails=name)
    assert name in began and {*began} <= at_most


def test_a_failure_beside_other_steps_fails_the_command(monkeypatch):
    assert set(call(monkeypatch, fails="matrix")) >= {"tests", "docs", "types", "lint", "matrix"}


def test_a_step_in_a_process_has_its_exit_code_and_output():
    code, said = ci._process("paint", captured=True)
    assert code == 2 and "no step is called paint" in said


def test_a_step_fails_with_its_command():
    with pytest.raises(SystemExit, match=r"exit code 3: .* -c import sys; sys\.exit"):
        ci._run([sys.executable, "-c", "import sys; sys.exit(3)"])


@pytest.mark.parametrize(("passed", "fails"), [(5, False), (4, True)])
def test_fewer_tests_than_there_were_fail(passed, fails, monkeypatch):
    """The report has pytest's form: 7 tests, of which some were skipped."""
    monkeypatch.setattr(ci, "_of_readme", lambda pattern: f"{sys.executable} -c 'import sys; {WRITE % (7 - passed)}'")
    with pytest.raises(SystemExit, match="tests have gone") if fails else contextlib.nullcontext():
        ci._suite("", at_least=5)


WRITE = 'open(sys.argv[-1].partition("=")[2], "w").write("<r><testsuite tests=\\"7\\" skipped=\\"%d\\" time=\\"1\\"/></r>")'


def test_hooks_ahead_of_a_commit_are_steps():
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    steps = [line.partition("python -m tools.ci ")[2].split(",")[0].strip() for line in config.splitlines() if "tools.ci " in line]
    assert {"lint", "generated"} <= set(steps) <= set(ci.STEPS)


def test_every_data_file_has_its_commands_and_they_parse():
    names = {path.name.removesuffix(".json.gz") for path in measure.DATA.glob("*.json.gz")}
    assert names >= {f"h200-{what}" for what in measure.COMMANDS} and all(map(measure.commands_of, names))
    for command in (line for lines in measure.COMMANDS.values() for line in lines):
        words, found, context = shlex.split(command), main, click.Context(main)
        while isinstance(found, click.Group):
            name, found, words = found.resolve_command(context, words)
            context = click.Context(found, info_name=name, parent=context)
        found.parse_args(context, [*words, "--json"])


def test_a_data_file_holds_all_reports_of_its_commands(tmp_path):
    """The file is the same, byte for byte, for the same results."""
    told = json.loads(gzip.decompress((measure.DATA / "h200-kda-layer.json.gz").read_bytes()))
    asked = []

    def run(*words: str) -> str:
        asked.append(words)
        return json.dumps(told)

    path = measure.refresh("h200-flashinfer", tmp_path, run)
    first = path.read_bytes()
    assert load([path]).reports == [told] * len(measure.COMMANDS["flashinfer"]) and all(words[-1] == "--json" for words in asked)
    assert measure.refresh("h200-flashinfer", tmp_path, run).read_bytes() == first
    with pytest.raises(ValueError, match="h100-flashinfer would be of NVIDIA H200"):
        measure.refresh("h100-flashinfer", tmp_path, run)


def test_results_that_are_there_become_a_data_file(tmp_path):
    (tmp_path / "now.json").write_bytes(gzip.decompress((measure.DATA / "h200-all.json.gz").read_bytes()))
    kept = measure.keep("h200-all", [tmp_path / "now.json"], tmp_path)
    assert load([kept]).as_dict() == load([tmp_path / "now.json"]).as_dict()
    with pytest.raises(ValueError, match="h100-all would be of NVIDIA H200"):
        measure.keep("h100-all", [tmp_path / "now.json"], tmp_path)


def test_the_page_of_all_operators_shows_the_data():
    measured = cards.suites()
    assert cards.PAGE.read_text() == cards.page_of(measured)
    both = cards.page_of(measured | {"OTHER": measured["H200"]})  # side by side
    assert "H200, us (TB/s) | × copy (%) | OTHER, us" in both


def test_a_measurement_that_fails_leaves_the_data_as_it_is(tmp_path):
    (tmp_path / "h200-all.json.gz").write_bytes(b"as it was")

    def run(*words: str) -> str:
        raise subprocess.CalledProcessError(1, words)

    with pytest.raises(subprocess.CalledProcessError):
        measure.refresh("h200-all", tmp_path, run)
    assert (tmp_path / "h200-all.json.gz").read_bytes() == b"as it was"


@pytest.mark.parametrize("name", measure.TABLES)
def test_a_table_of_transformers_is_put_into_its_page(tmp_path, name):
    page, asked, begin = tmp_path / "page.md", [], measure.begin(name)
    page.write_text(measure.PAGE.read_text())
    before, rest = page.read_text().split(begin)
    measure.refresh_table(name, page, lambda *words: asked.append(words) or "| a table |\n")
    assert page.read_text() == f"{before}{begin}\n| a table |\n\n{measure.END}{rest.partition(measure.END)[2]}"
    ((module, *options),) = asked
    assert module == "tools.demo" and demo.make_context("demo", options).params["markdown"]
