"""`python -m tools.demo`: its table and its command line."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("transformers", minversion="5.15", reason="needs transformers 5.15: pip install 'ssmgen[hf]'")

from tools.demo import DemoError, run
from tools.demo.__main__ import demo
from tools.demo.measure import ACCELERATED, FUSED, FUSED_GRAPH, GRAPH, PATCHED, PLAIN, Launches, Options, Row
from tools.demo.packages import PACKAGES
from tools.demo.prompts import PromptRow
from tools.demo.run import Failure, Report
from tools.demo.table import COLUMNS, PROMPT_COLUMNS, as_markdown, kernel_lists, print_table

FACTS = {"device": "GPU", "torch": "2.11", "transformers": "5.17", "date": "2026-01-02T03:04:05", "kernel_packages": []}


def row(**changes) -> Row:
    values = {
        "family": "mamba2", "like": "Codestral", "served": 8, "layers": 8, "batch": 1, "same": 48, "tokens": 48,
        "ms": {PLAIN: 6.0, PATCHED: 3.0, GRAPH: 0.5}, "kernels": {PLAIN: 400, PATCHED: 200, GRAPH: 200},
    }  # fmt: skip
    return Row(**{**values, **changes})


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def table(text: str, columns=COLUMNS) -> list[dict[str, str]]:
    """Rows of a table in Markdown, by title, with ordinary blanks."""
    lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in text.splitlines() if line.startswith("|")]
    titles = cells(lines[0])
    assert titles == [column.title for column in columns if column.title and not column.title.startswith(PACKAGES)]
    return [dict(zip(titles, cells(line), strict=True)) for line in lines[2:]]


def test_markdown_has_a_line_per_row_and_a_footnote_per_reason():
    eager = {"ms": {PLAIN: 6.0, PATCHED: 3.0}, "notes": {"graph ms": "RuntimeError: no capture"}}
    uncounted = {"kernels": {}, "notes": {f"{way} kernels": "DemoError: no CUPTI" for way in (PLAIN, PATCHED)}}
    rows = [row(), row(family="jamba", served=7, **eager), row(family="bamba", **eager), row(family="zamba", **uncounted)]
    text = as_markdown(Report(FACTS, rows, [Failure("lfm2", 64, "it broke")]))
    first, jamba, bamba, zamba = table(text)
    assert first == {
        "family": "mamba2", "as wide as": "Codestral", "layers": "8", "batch": "1", "transformers ms": "6.00", "patched ms": "3.00 (2.0 ×)",
        "fused ms": "", "graph ms": "0.50 (12.0 ×)", "fused graph ms": "", "accelerate ms": "", "× floor": "", "kernels": "400",
        "patched kernels": "200", "fused kernels": "", "same tokens": "48/48",
    }  # fmt: skip
    assert jamba["layers"] == "7 of 8"
    assert jamba["graph ms"] == bamba["graph ms"] == "- (1)"
    assert zamba["kernels"] == zamba["patched kernels"] == "- (2)"
    assert "(1) RuntimeError: no capture\n(2) DemoError: no CUPTI" in text and "not measured: lfm2, batch 64: it broke" in text
    assert "vocabulary is of 1024 tokens" in text and "No package of kernels" in text
    assert "transformers may use fla" in as_markdown(Report({**FACTS, "kernel_packages": ["fla"]}, rows))


def test_a_fused_familys_ways_have_their_cells():
    ms = {PLAIN: 6.0, PATCHED: 3.0, FUSED: 2.0, GRAPH: 0.5, FUSED_GRAPH: 0.25}
    fused, eager = row(ms=ms | {ACCELERATED: 0.2}, kernels=dict(zip(ms, (400, 200, 100, 200, 100), strict=True))), dict(ms)
    del eager[FUSED_GRAPH]
    fused = replace(fused, floor_ms=0.16)
    first, second = table(as_markdown(Report(FACTS, [fused, row(ms=eager, notes={f"{FUSED_GRAPH} ms": "no capture"})])))
    assert (first["fused ms"], first["fused kernels"], first["fused graph ms"]) == ("2.00 (3.0 ×)", "100", "0.25 (24.0 ×)")
    assert (first["accelerate ms"], second["accelerate ms"]) == ("0.20 (30.0 ×)", "")
    assert (first["× floor"], second["× floor"]) == ("1.25", "")
    assert second["fused graph ms"] == "- (1)"


def test_prompts_have_a_table_of_their_own():
    named = {"family": "mamba2", "like": "Codestral", "served": 8, "layers": 8, "batch": 1}
    ways = (PLAIN, PATCHED, FUSED)
    numbers = {"ms": (90.0, 30.0, 20.0), "kernels": (700, 200, 150), "memory": (3 << 29, 1 << 30, 1 << 29)}
    named_by_way = {unit: dict(zip(ways, values, strict=True)) for unit, values in numbers.items()}
    tokens = {"same": {PATCHED: 16, FUSED: 15}, "tokens": 16}
    both = PromptRow(**named, length=2048, **named_by_way, without=6.0, apart={PATCHED: 0.004, FUSED: 0.003}, **tokens)
    notes = dict.fromkeys((f"{PLAIN} {unit}" for unit in ("ms", "kernels", "memory")), "OutOfMemoryError: too much")
    ours = PromptRow(**named, length=8192, ms={PATCHED: 99.0}, kernels={PATCHED: 200}, memory={PATCHED: 1 << 32}, notes=notes)
    text = as_markdown(Report(FACTS, prompts=[both, ours]))
    first, second = table(text, PROMPT_COLUMNS)
    assert first == {
        "family": "mamba2", "as wide as": "Codestral", "layers": "8", "batch": "1", "prompt": "2048", "transformers ms": "90.00",
        "patched ms": "30.00 (3.0 ×)", "fused ms": "20.00 (4.5 ×)", "without ms": "6.00", "kernels": "700", "patched kernels": "200",
        "fused kernels": "150", "GiB": "1.50", "patched GiB": "1.00", "fused GiB": "0.50", "difference": "4.0e-03",
        "fused difference": "3.0e-03",
        "same tokens": "patched 16/16, fused 15/16",
    }  # fmt: skip
    assert second["transformers ms"] == second["kernels"] == second["GiB"] == "- (1)" and second["patched ms"] == "99.00"
    assert second["fused ms"] == second["fused difference"] == second["difference"] == second["same tokens"] == ""
    assert "(1) OutOfMemoryError: too much" in text and "that ends with its first new token; bf16" in text


def test_kernels_of_a_prompt_are_listed_by_way():
    named = {"family": "mamba2", "like": "Codestral", "served": 8, "layers": 8, "batch": 1, "ms": {}, "kernels": {}, "memory": {}}
    launches = {"gemm" * 40: Launches(2, 3000.0), "norm": Launches(8, 500.0)}
    report = Report(FACTS, prompts=[PromptRow(**named, length=64, by_kernel={PATCHED: launches})])
    (text,) = kernel_lists(report, width=20)
    head, first, second = text.split("\n")[1:]
    assert head == "mamba2, batch 1, a prompt of 64, patched: 10 launches, 3.50 ms"
    assert first.split() == ["3.000", "ms", "2", "gemm" * 5] and second.split() == ["0.500", "ms", "8", "norm"]
    assert report.as_dict()["prompts"][0]["by_kernel"][PATCHED]["norm"] == {"count": 8, "us": 500.0}


def test_a_terminal_gets_the_same_cells():
    console = Console(width=240, record=True, file=io.StringIO())
    print_table(
        Report(FACTS, [row(), row(ms={PLAIN: 1.0, PATCHED: 1.0}, notes={"graph ms": "why"})], [Failure("lfm2", None, "it broke")]), console
    )
    text = console.export_text()
    assert "12.0 ×" in text and "48/48" in text and "(1) why" in text and "not measured: lfm2: it broke" in text


def test_different_tokens_fail_a_report():
    with pytest.raises(DemoError, match=r"1 failed:\n  - mamba2: 47 of 48 tokens are the same$"):
        Report(FACTS, [row(same=47), row(same=47, batch=64)]).check()
    Report(FACTS, [row()]).check()


# The command.


def invoke(*args: str):
    return CliRunner().invoke(demo, [*args])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    result = invoke()
    assert result.exit_code == 1 and result.stderr == "DemoError: the demonstration needs a CUDA device, and torch sees none\n"


def test_wrong_command_lines(tmp_path):
    assert "no family is named zebra" in invoke("--model", "zebra").stderr
    assert invoke("--batch", "0").exit_code == 2
    result = invoke("--json", str(tmp_path / "none" / "a.json"))
    assert result.exit_code == 2 and "there is no directory" in result.stderr
    assert invoke("--kernels").exit_code == 2 and "name a length with --prompt" in invoke("--kernels").stderr


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'ssmgen[hf]'" in invoke().stderr


def test_a_run_is_printed_and_saved(monkeypatch, tmp_path):
    asked = []

    def ran(presets, batches, options, watch):
        asked.append(([preset.name for preset in presets], batches, options))
        return Report(FACTS, [row()], [Failure("mamba", 64, "it broke")])

    for name, value in {"run": ran, "need_device": lambda: None, "quiet": lambda: None}.items():
        monkeypatch.setattr(run, name, value)
    file = tmp_path / "a.json"
    result = invoke("--model", "mamba2", "--model", "mamba", "--batch", "4", "--batch", "4", "--tokens", "9", "--json", str(file))
    assert asked == [(["mamba2", "mamba"], (4,), Options(layers=8, tokens=9, rounds=5))]
    assert result.exit_code == 1 and "1 failed:\n  - mamba, batch 64: it broke" in result.stderr
    assert "(12.0\N{NO-BREAK SPACE}×) |" in result.stdout
    saved = json.loads(file.read_text())
    assert saved["device"] == "GPU" and saved["rows"][0]["ms"] == {PLAIN: 6.0, PATCHED: 3.0, GRAPH: 0.5}
    assert saved["failed"] == [{"family": "mamba", "batch": 64, "error": "it broke"}]
    two = ("--prompt", "512", "--prompt", "64")
    for args, sizes, lengths in (((), (1, 64), ()), (two, (1,), (512, 64)), (("--batch", "8", *two), (8,), (512, 64))):
        invoke("--model", "mamba2", *args)
        assert asked[-1] == (["mamba2"], sizes, Options(prompts=lengths))
    invoke("--prompt", "64", "--kernels")
    assert asked[-1][2] == Options(prompts=(64,), by_kernel=True)
    invoke("--prompt", "64", "--longest", "0.5")
    assert asked[-1][2] == Options(prompts=(64,), longest=0.5)
