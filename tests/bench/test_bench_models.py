"""`ssmgen bench models` without a GPU: its cases, made-up results, and the results in docs/data."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from bench_cases import HEAD, SILENT, recorded, small_case
from click.testing import CliRunner

from ssmgen import cli
from ssmgen.bench import autotuners, bench_of, case, models, models_page, peers_ahead, report, timing
from ssmgen.bench.formats import BenchFileError, CasesFailedError
from ssmgen.bench.models import COLUMNS, Column
from ssmgen.calls.operator import call_of
from ssmgen.compat import mamba_ssm
from ssmgen.errors import ModelError
from ssmgen.launch import runtime
from ssmgen.select import registry
from ssmgen.select.catalog import OPERATOR_OF
from ssmgen.select.models import find_model
from ssmgen.spec.kernel import Arch
from tools import measure
from tools import models as page

SM90 = Arch.parse("sm_90a")
ONE_OF_EACH = ("mamba-130m", "mamba2-130m", "qwen3.5-0.8b", "kimi-linear-48b-a3b", "ling-2.5-1t", "rwkv7-0.1b", "mamba3-mimo-187m")
DATA = sorted(page.DATA.glob(f"*{page.SUFFIX}"))

pytestmark = pytest.mark.usefixtures("one_compile")


# The cases.


def test_every_model_has_a_cell_in_every_column():
    found = {(name, cell.column.name) for cell in models.cells() for name in cell.names}
    assert found == {(n, c) for n in models.models() for c in COLUMNS}


def test_models_of_one_shape_share_a_cell():
    work = models.cells(("mamba2-780m", "granite-4.0-h-tiny", "Qwen/Qwen3.8-27B-FP8", "qwen3.5-27b", "falcon-h1-1.5b"))
    names = {tuple(cell.names) for cell in work}
    assert names == {("mamba2-780m", "granite-4.0-h-tiny"), ("qwen3.8-27b", "qwen3.5-27b"), ("falcon-h1-1.5b",)}
    assert len(work) == 3 * len(COLUMNS)
    with pytest.raises(ModelError, match="'mamba-4' is not a known model"):
        models.cells(("mamba-4",))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_cells_have_the_model_s_sizes_and_a_kernel(name):
    model = find_model(name)
    for cell in models.cells((name,)):
        made = bench_of(cell.op).made(cell.at, "meta")
        call, tokens = made.arguments(0), 4096
        out = call["out"].shape
        assert out.numel() == model.nheads * model.shape[0] * (cell.column.batch or tokens)
        if cell.column.sequences > 1:
            assert call["cu_seqlens"].shape == (17,) and call["state" if "state" in call else "final_states_out"].shape[0] == 16
        elif cell.column.batch:
            assert call["state_indices"].shape == (cell.column.batch,)
        assert models.variants_of(cell, SM90, None)


PACKED = {
    "chunk_scan": {"shape": (2, 1, 3, 40), "headdim": 16, "d_state": 16},
    "chunk_delta_rule": {"shape": (1, 2, 3, 40), "head_k": 16, "head_v": 16},
    "chunk_linear_attention": {"shape": (2, 2, 3, 40), "head_k": 16, "head_v": 16},
    "selective_scan": {"shape": (16, 3, 40)},
    "mamba3_chunk_scan": {"model": "mamba3-mimo-187m", "shape": (3, 40)},
}


@pytest.mark.parametrize("op", PACKED)
def test_packed_prompts_are_the_batch_end_to_end(op):
    one = small_case(op, **PACKED[op], packed=True)
    assert one.shared["cu_seqlens"].tolist() == [0, 40, 80, 120]
    assert 0 < max(one.gate(pdl=None).values()) < 1e-2
    plain = small_case(op, **PACKED[op])
    assert one.bytes == plain.bytes and one.arguments(0)["out"].numel() == plain.arguments(0)["out"].numel()
    assert bench_of(op).words({**bench_of(op).named(one.at), "packed": True}).endswith(", packed")


@pytest.mark.parametrize("op", ["chunk_scan", "chunk_delta_rule", "chunk_linear_attention"])
def test_peers_get_packed_prompts_in_one_row(op, monkeypatch):
    calls = recorded(monkeypatch)
    one = small_case(op, **PACKED[op], packed=True)
    for peer in bench_of(op).peers.values():
        if launch := peer(one):
            launch(0)
    assert calls
    for name, call in calls.items():
        assert call["cu_seqlens"].tolist() == [0, 40, 80, 120], name
        rows = [t for t in (call.get("x"), call.get("q")) if t is not None]
        assert all(t.shape[:2] == (1, 120) if t.dim() == 4 else t.shape[0] == 120 for t in rows), name
    if op == "chunk_scan":
        (call,) = calls.values()
        assert call["seq_idx"].tolist() == [[0] * 40 + [1] * 40 + [2] * 40] and call["return_varlen_states"] is True


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mamba3-siso-187m", "mamba3-mimo-187m"])
def test_mamba3_s_peer_computes_the_same_prompts(name, packed, monkeypatch):
    """The drop-ins with its signatures replace the peer's functions."""
    monkeypatch.setattr(report, "imported", lambda module, function: getattr(mamba_ssm, function))
    one = small_case("mamba3_chunk_scan", model=name, shape=(2, 20), packed=packed)
    (peer,) = bench_of("mamba3_chunk_scan").peers.values()
    out, angle, state, k, v = peer(one)(0)
    call = one.arguments(0)
    one.function(**call)
    assert torch.allclose(out.view_as(call["out"]).float(), call["out"].float(), rtol=0.1, atol=0.1)
    assert torch.allclose(state, call["state"], rtol=0.05, atol=0.05) and torch.allclose(angle, call["angle_state"], rtol=1e-3, atol=1e-5)
    assert torch.equal(v, call["v_state"]) and torch.allclose(k.float(), call["k_state"].float(), rtol=0.05, atol=0.05)


def test_pools_are_packed_already():
    for op in ("chunk_scan", "chunk_delta_rule"):
        assert bench_of(op).mistakes(forms=("pool",), packed=True) and not bench_of(op).mistakes(forms=("batch",), packed=True)


@pytest.fixture
def small(monkeypatch):
    """Small cells on the CPU: ours take 2 us, the peers of delta rules 1 us, and others 4 us."""
    monkeypatch.setattr(models, "TOKENS", 32)
    monkeypatch.setitem(COLUMNS, "step_64", Column("step_64", "decode step, batch 64", batch=2))
    monkeypatch.setattr(case, "MOST", 2**17)
    monkeypatch.setattr(report, "begin", lambda method="": HEAD | {"rows": [], "failed": [], "method": method})
    monkeypatch.setattr(report, "slot_copies", lambda state, slots, pdls: {"copy": lambda i: slots[i]})
    monkeypatch.setattr(models, "peers_of", lambda one, peers: {f"{name.partition('.')[0]}.f": one.beside.get("mul") for name in peers})
    monkeypatch.setattr(models, "shared_cache", lambda: contextlib.nullcontext())  # which has no `get`
    monkeypatch.setattr(models, "_compile", lambda work, device: None)
    monkeypatch.setattr(runtime, "device_arch", lambda index: SM90)
    monkeypatch.setattr(timing, "sm_mhz", lambda: 1980)

    def device_us(contenders, sets, rounds, captures, least):
        contenders["ssmgen"](0)
        return {name: 2.0 if name == "ssmgen" else 1.0 if name.startswith("fla.") else 4.0 for name in contenders}

    monkeypatch.setattr(timing, "device_us", device_us)


def test_a_run_measures_checks_and_names_the_worst(small):
    torch.manual_seed(0)
    found = models.run(("rwkv7-0.1b", "mamba-130m"), watch=SILENT, device="cpu")
    assert not found["failed"] and not list(models.faults_of(json.loads(json.dumps(found))))
    assert len(found["rows"]) == 2 * len(COLUMNS) and found["seconds"].keys() == {"compiling", "all"}
    columns = models.results_of(found)
    assert list(columns) == ["rwkv7-0.1b", "mamba-130m"]  # fla takes half of our time
    assert {result.ratio for result in columns["rwkv7-0.1b"].values()} == {2.0} and columns["mamba-130m"]["prompt"].ratio == 0.5
    assert found["peers"].keys() >= {"fla", "mamba_ssm"}


def test_a_wrong_result_is_not_timed(small, monkeypatch):
    monkeypatch.setattr(case.Case, "errors", lambda self, call, expected: {"out": 1.0})
    found = models.run(("mamba-130m",), watch=SILENT, device="cpu")
    assert not found["rows"] and len(found["failed"]) == len(COLUMNS) and "not timed" in found["failed"][0]["error"]


def test_an_interrupted_run_keeps_its_results(small, monkeypatch):
    measured, done = models.measured, []

    def interrupted(cell, *rest):
        if done:
            raise KeyboardInterrupt
        done.append(cell)
        return measured(cell, *rest)

    monkeypatch.setattr(models, "measured", interrupted)
    found = models.run(("mamba-130m",), columns=("prompt", "packed"), watch=SILENT, device="cpu")
    assert [row["column"] for row in found["rows"]] == ["prompt"] and not list(models.faults_of(json.loads(json.dumps(found))))
    assert [(entry["column"], entry["error"]) for entry in found["failed"]] == [("packed", "not reached: the run was interrupted")]


# Results.


def made_up(ratios: dict[str, tuple[float, ...]]) -> dict[str, object]:
    """A report of these ratios, model by model and column by column."""
    rows = [
        {"models": [name], "column": column, "op": "chunk_scan", "case": "a case", "us": 10 * ratio, "copy_us": 1.0}
        | {"peers": {"fla": 10.0, "slow": 99.0}}
        for name, given in ratios.items()
        for column, ratio in zip(COLUMNS, given, strict=True)
    ]  # fmt: skip
    return HEAD | {"peers": {"fla": "0.6", "slow": ""}, "seconds": {"all": 100.0}, "rows": rows, "failed": []}


GOOD = made_up({"mamba2-130m": (0.5, 0.9, 0.25, 1.0), "falcon-h1-7b": (0.4, 0.4, 0.4, 0.4)})
BAD = made_up({"mamba2-130m": (0.5, 0.9, 0.25, 1.0), "falcon-h1-7b": (0.4, 0.4, 2.87, 1.5)})


def test_losses_are_ratios_above_one_the_worst_first():
    assert models.losses(GOOD) == []
    first, second = models.losses(BAD)
    assert first == "falcon-h1-7b, prompt of 4096 tokens: 28.7 us, fla 10.0 us, ratio 2.87" and "16 packed" in second
    assert models.losses({**BAD, "rows": [row | {"peers": {}} for row in BAD["rows"]]}) == []


def test_what_is_missing_is_named():
    gone = models.missing(GOOD)
    assert "mamba-130m, decode step, batch 1" in gone and not any(line.startswith(("mamba2-130m", "falcon-h1-7b")) for line in gone)


def test_the_worst_ratio_comes_first():
    assert models_page.headline(BAD).startswith("The worst of 8 ratios is 2.87: falcon-h1-7b, prompt of 4096 tokens")
    text = models_page.as_text(BAD).splitlines()
    places = [next(i for i, line in enumerate(text) if line.startswith(name)) for name in ("falcon-h1-7b", "mamba2-130m")]
    assert places == sorted(places) and any("2.87" in line for line in text[:4])
    assert len(models_page.as_csv(BAD).splitlines()) == 1 + 2 * len(COLUMNS) * 2
    assert models_page.headline({**BAD, "rows": []}) == "No peer was timed."


def test_the_plot_is_a_file_by_itself_with_a_mark_for_each_ratio():
    root = ElementTree.fromstring(str(models_page.plot(BAD)))
    marks = [node for node in root if node.tag.endswith("path")]
    assert len(marks) == 8 + len(COLUMNS)  # and the legend
    assert not models_page.plot({**BAD, "rows": []})


def test_files_are_checked(tmp_path):
    path = tmp_path / "saved.json.gz"
    path.write_bytes(gzip.compress(json.dumps(BAD).encode()))
    assert models_page.load(path) == json.loads(json.dumps(BAD))
    for wrong, said in (
        ({"rows": 3}, "rows is 3"),
        ({"peers": []}, "peers is"),
        ({"rows": [BAD["rows"][0] | {"column": "x"}]}, "does not exist"),
    ):
        path.write_bytes(gzip.compress(json.dumps(BAD | wrong).encode()))
        with pytest.raises(BenchFileError, match=said):
            models_page.load(path)
    with pytest.raises(BenchFileError, match="cannot be read"):
        models_page.load(tmp_path / "none.json")


def test_the_command_shows_saved_results(tmp_path):
    path, html = tmp_path / "saved.json", tmp_path / "page.html"
    path.write_text(json.dumps(BAD))
    run = CliRunner().invoke
    assert "is 2.87" in run(cli.main, ["bench", "models", "--saved", str(path)]).output
    assert run(cli.main, ["bench", "models", "--saved", str(path), "--html", str(html)]).exit_code == 0
    assert "falcon-h1-7b" in html.read_text() and "<svg" in html.read_text()
    assert run(cli.main, ["bench", "models", "--saved", str(path), "--model", "mamba-130m"]).exit_code == 2
    failed = BAD | {"failed": [{"models": ["x"], "column": "prompt", "op": "chunk_scan", "error": "no kernel"}]}
    with pytest.raises(CasesFailedError, match="1 not timed: x, prompt: no kernel"):
        models_page.show(failed, "table")


# The processes that compile peers.


def test_each_process_calls_peers_at_its_share_of_the_cells(monkeypatch):
    monkeypatch.setattr(case, "MOST", 2**17)
    monkeypatch.setattr(models, "TOKENS", 32)
    calls = recorded(monkeypatch)
    assert [peers_ahead.call_peers(f"{i}/4", "", ("rwkv7-0.1b",), "meta") for i in range(4)] == [1, 1, 1, 1]
    assert [peers_ahead.call_peers(f"{i}/2", "prompt,packed", ("rwkv7-0.1b",), "meta") for i in range(2)] == [1, 1]
    assert [peers_ahead.call_peers(f"{i}/2", "step_64", ("rwkv7-0.1b",), "meta") for i in range(2)] == [1, 0]
    assert {name.rpartition(".")[2] for name in calls} >= {"chunk_rwkv7"}


@pytest.mark.matrix
def test_processes_that_take_too_long_are_ended(tmp_path, monkeypatch):
    (tmp_path / "sleeper.py").write_text("import sys, time\nopen(sys.argv[1].replace('/', '-'), 'w').close()\ntime.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    with peers_ahead.compiling(("mamba-130m",), (), 2, limit_s=8, module="sleeper"):
        pass
    assert time.monotonic() - began < 60
    assert {path.name for path in tmp_path.glob("?-2")} == {"0-2", "1-2"}


class Bench:
    """A stand-in for Triton's testing module. It notes how long a launch would be timed."""

    def __init__(self):
        self.rounds, self.do_bench = [], self.timed

    def timed(self, launch, warmup=25, rep=100, quantiles=None):
        self.rounds.append((warmup, rep, quantiles))
        return launch()


def test_autotuners_of_peers_time_each_choice_for_a_shorter_time(monkeypatch):
    testing = Bench()
    monkeypatch.setattr(autotuners, "_testing", lambda: testing)
    with pytest.raises(KeyError), autotuners.shorter():
        assert testing.do_bench(lambda: "time", quantiles=(0.5,)) == "time" and testing.rounds == [(5, 20, (0.5,))]
        raise KeyError
    assert testing.do_bench == testing.timed


def test_cells_are_measured_with_shorter_autotuning(monkeypatch):
    testing, seen = Bench(), []

    def made(at, device):
        testing.do_bench(lambda: None)
        seen.extend(testing.rounds)
        raise KeyError

    monkeypatch.setattr(autotuners, "_testing", lambda: testing)
    with pytest.raises(KeyError):
        models.measured(SimpleNamespace(bench=SimpleNamespace(made=made), at=None), torch.device("cpu"), 1, False)
    assert seen == [(5, 20, None)]


def test_autotuners_of_compiling_processes_launch_each_choice_once(monkeypatch):
    testing, launches = Bench(), []
    monkeypatch.setattr(autotuners, "_testing", lambda: testing)
    autotuners.untimed()
    assert testing.do_bench(lambda: launches.append(1), quantiles=(0.5, 0.2, 0.8)) == [1.0, 1.0, 1.0]
    assert testing.do_bench(lambda: launches.append(1)) == 1.0 and len(launches) == 2 and testing.rounds == []


# The data of cards.


def test_results_of_some_models_each_become_one_file(tmp_path):
    parts = [BAD | {"rows": BAD["rows"][:3]}, BAD | {"rows": BAD["rows"][3:], "device": "NVIDIA H200"}]
    with pytest.raises(ValueError, match="more than one device: a GPU, NVIDIA H200"):
        models.stitched(parts)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, part in zip(paths, parts, strict=True):
        path.write_text(json.dumps(part | {"device": "NVIDIA H200"}))
    kept = models_page.load(measure.keep("h200-models", paths, tmp_path))
    assert kept["rows"] == BAD["rows"] and kept["seconds"] == {"all": 200.0}
    with pytest.raises(ValueError, match="h100-models would be of NVIDIA H200"):
        measure.keep("h100-models", paths, tmp_path)
    assert measure.commands_of("h200-models") == ["bench models"]


def test_the_pages_of_the_data_are_up_to_date():
    for path, text in page.pages(page.reports()).items():
        assert path.read_text() == text, path.name


def test_a_page_of_made_up_data_has_the_worst_first(tmp_path):
    texts = page.pages({"H200": BAD}, tmp_path)
    text, plot = texts[tmp_path / page.PAGE.name], texts[tmp_path / "models-h200.svg"]
    assert text.index("falcon-h1-7b") < text.index("mamba2-130m") and "models-h200.svg" in text and plot.startswith("<svg")
    assert "lacks a complete measurement" in page.pages({}, tmp_path)[tmp_path / page.PAGE.name]


@pytest.mark.skipif(not DATA, reason="docs/data has no CARD-models.json.gz: `python -m tools.measure CARD-models` measures one")
@pytest.mark.parametrize("path", DATA, ids=lambda path: Path(path).name)
def test_no_peer_is_faster_at_any_model(path):
    found = models_page.load(path)
    assert not found["failed"] and models.missing(found) == []
    lost = models.losses(found)
    assert not lost, "\n".join(lost)


# Cases of a card whose variant was changed after the measurement, because `ssmgen tune` found a faster one.
FASTER = {"NVIDIA H200": {(name, "step_1") for name in ("mamba3-mimo-187m", "mamba3-mimo-894m", "mamba3-mimo-1.5b", "olala")}}


@pytest.mark.matrix
@pytest.mark.parametrize("path", DATA, ids=lambda path: Path(path).name)
def test_saved_times_are_of_the_variants_that_serve_today(path):
    """A changed rule changes times that users read: measure again, or add the case to FASTER with evidence."""
    found = models_page.load(path)
    saved = {(row["models"][0], row["column"]): row["spec"] for row in found["rows"]}
    changed = {(cell.names[0], cell.column.name) for cell in models.cells() if not same(saved, cell, found["device"])}
    assert changed == FASTER.get(found["device"], set())


def same(saved, cell, gpu):
    """Whether the saved variant is the one that the table and the rules choose. Fields that are newer than the data are not compared."""
    made = cell.bench.made(cell.at, "meta")
    problem, size, *_ = call_of(made.function, **made.arguments(0)).problem()
    chosen = str(registry.select(OPERATOR_OF[type(problem)], problem, size, SM90, True, gpu))
    (family, then), (family_now, now) = (fields_of(spec) for spec in (saved[cell.names[0], cell.column.name], chosen))
    return family == family_now and all(now.get(name) == value for name, value in then.items())


def fields_of(spec):
    family, _, fields = spec.partition(":")
    return family, dict(field.split("=") for field in fields.split(","))
