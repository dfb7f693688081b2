"""The forms of results: text, rich tables, JSON, CSV, a page; saved results; and the display of progress."""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from bench_cases import MEASURED, SMALL, small_run, without_a_gpu
from click.testing import CliRunner
from compiled import compile_once
from rich.console import Console

from ssmgen import cli
from ssmgen.bench import bench_of, charts, formats, progress, table
from ssmgen.bench.formats import BenchFileError, load
from ssmgen.bench.html import as_html
from ssmgen.bench.suite import Suite

FAILED = {"op": "kda", "error": "RuntimeError: <it> fell over"}


def render(*args: str, code: int = 0):
    result = CliRunner().invoke(cli.main, ["bench", "render", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def measured() -> Suite:
    """Results that include a failed operator and a failed case."""
    suite = load([MEASURED])
    case = {k: v for k, v in suite.reports[0]["rows"][0].items() if k in ("model", "state", "heads", "tokens", "intermediates")}
    suite.reports[0]["failed"] = [case | {"batch": 3, "error": "with PDL: output error 0.5"}]
    suite.failed.append(FAILED)
    return suite


@pytest.fixture(scope="module")
def small_reports() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_a_gpu(monkeypatch)
        compile_once(monkeypatch)
        return [small_run(op) for op in SMALL]


@pytest.fixture
def every(small_reports) -> Suite:
    """A small report of every operator."""
    return Suite(copy.deepcopy(small_reports))


# Files.


def test_reports_of_one_and_of_several_operators_are_read_plain_and_compressed(tmp_path):
    whole = json.loads(MEASURED.read_text())
    one, packed = tmp_path / "one.json", tmp_path / "all.json.gz"
    one.write_text(json.dumps(whole["reports"][2]))
    packed.write_bytes(gzip.compress(json.dumps(whole | {"failed": [FAILED]}).encode()))
    suite = load([one, packed])
    assert suite.reports == [whole["reports"][2], *whole["reports"]] and suite.failed == [FAILED]


def test_every_wrong_file_is_named(tmp_path):
    wrong = {
        "empty.json": b"",
        "list.json": b"[1]",
        "other.json": b'{"rows": [], "device": ""}',
        "cut.json.gz": gzip.compress(b"{}" * 999)[:20],
        "row.json": json.dumps(json.loads(MEASURED.read_text())["reports"][0] | {"rows": [{"model": "m"}]}).encode(),
        "op.json": json.dumps({"op": "softmax"}).encode(),
    }
    for name, data in wrong.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(BenchFileError) as e:
        load([MEASURED, *(tmp_path / name for name in wrong), tmp_path / "absent.json"])
    unreadable, *lines = str(e.value).splitlines()[1:]
    assert [line.partition(".json")[0].rpartition("/")[2] for line in lines] == ["empty", "list", "other", "cut", "row", "op"]
    assert lines[2].endswith("torch is missing; compiler is missing; ceilings_tbs is missing")
    assert "rows[0].heads is missing; rows[0].state is missing; rows[0].tokens is missing" in lines[4] and lines[4].endswith("; and more")
    assert "op is 'softmax'; expected one of" in lines[5]
    assert "absent.json: No such file" in unreadable
    assert "BenchFileError: these files are not what `ssmgen bench … --json` writes:" in render(tmp_path / "empty.json", code=1).stderr


def test_results_of_models_are_shown_by_their_own_command(tmp_path):
    (tmp_path / "models.json").write_text(json.dumps({"rows": [{"models": ["mamba-130m"], "column": "prompt"}], "failed": []}))
    assert "show it with `ssmgen bench models --saved`" in render(tmp_path / "models.json", code=1).stderr


def test_rendering_json_gives_what_was_read():
    assert json.loads(render(MEASURED, "--json").stdout) == json.loads(MEASURED.read_text())


# Forms.


@pytest.mark.parametrize("command", [["render", str(MEASURED)], ["all"], ["kda"]])
def test_forms_exclude_each_other(command, tmp_path):
    result = CliRunner().invoke(cli.main, ["bench", *command, "--json", "--html", str(tmp_path / "a.html")])
    assert result.exit_code == 2 and "expected only one of" in result.output
    result = CliRunner().invoke(cli.main, ["bench", *command, "--html", str(tmp_path / "absent" / "a.html")])
    assert result.exit_code == 2 and ", which does not exist; expected a directory" in result.output


def test_csv_has_a_row_per_case():
    rows = list(csv.DictReader(io.StringIO(render(MEASURED, "--csv").stdout)))
    reports = json.loads(MEASURED.read_text())["reports"]
    assert len(rows) == sum(len(r["rows"]) for r in reports)
    first = reports[0]["rows"][0]
    assert (rows[0]["op"], rows[0]["case"], rows[0]["size"]) == ("selective_state_update", "nemotron-h-8b, 16 heads, bf16 state", "1")
    for name, value in ("us", first["served_us"]), ("flashinfer_us", first["us"]["flashinfer"]), ("share", first["ceiling_fraction"]):
        assert float(rows[0][name]) == pytest.approx(value, rel=1e-5)
    assert rows[0]["out_error"] == rows[0]["failed"] == "" and rows[0]["spec"] == first["spec"]


def test_csv_says_what_failed(measured):
    rows = list(csv.DictReader(io.StringIO(formats.as_csv(measured))))
    assert [(row["op"], row["size"], row["failed"]) for row in rows[-2:]] == [
        ("selective_state_update", "3", "with PDL: output error 0.5"), ("kda", "", FAILED["error"])]  # fmt: skip
    assert formats.as_csv(Suite()) == ""


def test_every_operator_in_every_form(every):
    assert len(formats.as_csv(every).splitlines()) == 1 + sum(len(report["rows"]) for report in every.reports)
    text, page = table.as_text(every), as_html(every)
    out = io.StringIO()
    table.print_tables(every, Console(file=out, width=200))
    for op in SMALL:
        assert f"\n{op}\n" in text
        assert f'<section id="{op}">' in page and f"\n{op}\n" in out.getvalue()


def test_the_piped_table_is_plain(measured):
    text = render(MEASURED).stdout
    assert "\x1b" not in text and "nemotron-h-8b" in text and "\ncombine_splits\n" in text
    assert table.as_text(measured).endswith("batch 3: with PDL: output error 0.5\nnot timed: kda: RuntimeError: <it> fell over")


def test_one_operator_prints_its_report_alone(monkeypatch):
    without_a_gpu(monkeypatch)
    run = bench_of("kda").run
    monkeypatch.setattr(bench_of("kda"), "run", lambda **options: run(**options | SMALL["kda"], device="cpu"))
    result = CliRunner().invoke(cli.main, ["bench", "kda", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["op"] == "kda"
    words = "4 heads of 16 x 16, 4 key heads, f32 state, batch"
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == [f"{words} {b}" for b in (1, 9)]
    assert CliRunner().invoke(cli.main, ["bench", "kda", "--csv"]).stdout.startswith("op,case,size_of,size,us,")


# The table.


def test_ratios_are_coloured():
    assert [table.ratio(v).style for v in (0.8, 1.004, 1.2)] == ["green", "", "red"]
    assert str(table.ratio(None)) == "-" and str(table.number(0.98765, 3)) == "0.988"


def test_tables_on_a_terminal(measured):
    out = io.StringIO()
    table.print_tables(measured, Console(file=out, width=160, force_terminal=True, color_system="standard"))
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert "\x1b[32m" in out.getvalue() and text.count("NVIDIA H200") == 1, "said once where it is the same"
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "1 1.73 0.30 0.07 1.278 2.39 2.99 0.58 11.43 5.17 16.24 0.12 - latency" in lines
    assert "nemotron-h-8b, 16 heads, bf16 state" in lines and lines[-1] == "not timed: kda: RuntimeError: <it> fell over"


def test_progress_is_a_line_per_case_where_stderr_is_no_terminal(capsys):
    with progress.watching() as watch:
        watch.begins("kda", 1)
        watch.case("small")
        watch.timing(3)
        watch.ends("small: 2 us")
    assert type(watch) is progress.Watch and capsys.readouterr() == ("", "small: 2 us\n")


def test_progress_on_a_terminal():
    out = io.StringIO()
    display = progress.Display(Console(file=out, force_terminal=True, width=120))
    with display.progress:
        for op in ("kda", "gla"):
            display.begins(op, 2)
            display.case("4 heads [odd], batch 1")
            display.progress.refresh()
            display.timing(5)
            display.progress.refresh()
            display.ends("batch 1: 2.00 us")
            display.progress.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "kda: checking: 4 heads [odd], batch 1" in text and "gla: timing 5 contenders: 4 heads [odd], batch 1" in text
    assert "0/2" in text and "1/2" in text and "0:00:0" in text and text.count("batch 1: 2.00 us\n") == 2
    assert len(display.progress.tasks) == 1, "an operator's line makes room for the next one's"


def test_watching_asks_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.watching() as watch:
        assert type(watch) is progress.Display
    monkeypatch.setenv("TERM", "dumb")
    with progress.watching() as watch:
        assert type(watch) is progress.Watch


# The page.


def test_the_page_needs_nothing_else(measured):
    page = as_html(measured)
    assert not re.search(r"<script|<link|@import|url\(|\ssrc=|https?:", page)
    assert set(re.findall(r'href="([^"]*)"', page)) == {f"#{op}" for op in re.findall(r'<section id="([^"]*)"', page)}
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_the_page_says_where_and_how_and_what_failed(measured):
    page = as_html(measured)
    for words in "NVIDIA H200", "2.11.0+cu130", "CL-36424714 V13.0.88", "4.27 TB/s", "Device time: one CUDA graph holds":
        assert words in page
    assert "kda: RuntimeError: &lt;it&gt; fell over" in page and "batch 3: with PDL: output error 0.5" in page
    assert "measured" not in page.partition("<section")[0].partition("<dl>")[2].partition("</dl>")[0], "these reports have no date"
    measured.reports[0]["date"] = measured.reports[1]["date"] = "2031-05-06T07:08:09+00:00"
    assert page.count("2031-05-06") == 0 and as_html(measured).count("2031-05-06T07:08:09+00:00") == 1


def test_a_report_that_repeats_cases_has_a_section_of_its_own(measured):
    names = re.findall(r'<section id="([^"]*)"', as_html(measured))
    assert names == ["selective_state_update", "replay_selective_state_update", "combine_splits", "kda"], (
        "the second of a kind adds to the first"
    )
    again = [dict(measured.reports[0], device="another", date="2031-05-06"), dict(measured.reports[4])]
    measured.reports += again
    page = as_html(measured)
    assert re.findall(r'<section id="([^"]*)"', page) == [
        *names[:3], "selective_state_update-2", "combine_splits-2", "kda"]  # fmt: skip
    assert "another, 2031-05-06</span></h2>" in page and page.count("<dt>device</dt>") == 2
    labels = [re.findall(r'text-anchor="middle">([^<]*)<', svg) for svg in re.findall(r'<svg viewBox="0 0 280.*?</svg>', page, re.DOTALL)]
    assert len(labels) > 10 and all(len(set(of_one)) == len(of_one) for of_one in labels)


def test_any_number_of_reports_of_different_cases_share_a_section(measured):
    first = measured.reports[0]
    row = first["rows"][0]
    parts = [{**first, "failed": [], "rows": [{**row, "batch": batch}]} for batch in (1, 2, 3, 4)]
    page = as_html(Suite([*parts, parts[2]]))
    assert re.findall(r'<section id="([^"]*)"', page) == ["selective_state_update", "selective_state_update-2"]


def test_pictures_are_well_formed_and_stay_inside(every, measured):
    for suite in every, measured:
        found = re.findall(r"<svg.*?</svg>", as_html(suite), re.DOTALL)
        assert len(found) > 20
        for picture in map(ET.fromstring, found):
            left, top, width, height = map(float, picture.get("viewBox").split())
            for line in picture.iter("polyline"):
                for x, y in (map(float, point.split(",")) for point in line.get("points").split()):
                    assert left <= x <= left + width and top <= y <= top + height
            for bar in picture.iter("rect"):
                assert float(bar.get("x")) + float(bar.get("width")) <= width


def test_curves_are_of_ours_and_of_peers(measured):
    page = as_html(measured)
    section = page[page.index('<section id="replay_selective_state_update"') :]
    share, us = re.findall(r'<svg viewBox="0 0 280.*?</svg>', section, re.DOTALL)[:2]
    styles = [re.findall(r'class="line (\w+)"', picture) for picture in (share, us)]
    assert styles == [["peer0", "ours"], ["copy", "peer0", "ours"]]
    assert "ssmgen, 1: 4%" in share and "flashinfer, 1: 3%" in share and "ssmgen, 256: 44.7 us" in us and "flashinfer, 256: 53.8 us" in us


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1.4, 90.0], [2, 5, 10, 20, 50, 100]),
        ([2.6, 5.0], [2.5, 3, 4, 5]),
        ([3.0, 3.1], [2.5, 3]),
        ([0.5, 40000.0], [1, 10, 100, 1000, 10000]),
    ],
)
def test_logarithmic_axes_have_some_ticks(values, ticks):
    axis = charts.log_axis(values)
    assert axis.ticks == pytest.approx(ticks) and all(0 <= axis.place(v) <= 1 for v in (*values, *ticks))


def test_other_axes():
    assert charts.share_axis([0.2, 0.9]).ticks == [0, 0.25, 0.5, 0.75, 1] and charts.share_axis([1.3]).ticks[-1] == 1.25
    for most in (0.07, 0.3, 1.0, 4.2):
        axis = charts.zero_axis([most, most / 3])
        assert 3 <= len(axis.ticks) <= 7 and axis.place(most) < 1
    assert [charts.brief(v) for v in (0.05, 1.5, 20.0, 99.6, 1000.0)] == ["0.05", "1.5", "20", "100", "1000"]
