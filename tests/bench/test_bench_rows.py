"""Every operator's report in one schema of rows, cases that fail, and `bench all`."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from bench_cases import HEAD, MEASURED, SILENT, SMALL, small_run, without_a_gpu
from click.testing import CliRunner
from rich.console import Console
from selection import costly

from ssmgen import cli
from ssmgen.bench import bench_of, benchmarks, case, rows, suite, table, timing
from ssmgen.bench.formats import load
from ssmgen.bench.layer_case import Layer
from ssmgen.bench.progress import Display, Watch
from ssmgen.errors import ModelError, SsmgenError
from ssmgen.select.catalog import parse
from ssmgen.spec.kernel import DType

pytestmark = pytest.mark.usefixtures("one_compile")


class Recording(Watch):
    """Keeps what it hears."""

    def __init__(self):
        self.heard: list[tuple] = []
        super().__init__(lambda line: self.heard.append(("ends", line)))

    def begins(self, op, cases):
        self.heard.append(("begins", op, cases))

    def case(self, words):
        self.heard.append(("case", words))

    def timing(self, contenders):
        self.heard.append(("timing", contenders))


@pytest.fixture
def bench(monkeypatch):
    without_a_gpu(monkeypatch)
    return monkeypatch


# Rows.


@pytest.mark.parametrize("op", benchmarks())
def test_every_operators_report_is_rows_of_one_schema(op, bench):
    report = small_run(op)
    assert rows.op_of(report) == report["op"] == op and not report["failed"] and len(report["rows"]) >= 2
    found = rows.rows_of(report)
    assert len(found) == len(report["rows"]) == len({(row.case, row.size_of, row.size) for row in found})
    for row, raw in zip(found, report["rows"], strict=True):
        assert (row.op, row.us, row.copy_us, row.copy_ratio) == (op, 2.0, 4.0, 0.5)
        assert row.copy == ("multiplication" if "mul" in raw["us"] else "slot copy")
        ceiling = rows.point_of(report, raw).ceiling
        assert ceiling == "in_place" or row.copy == "multiplication"
        assert row.share == row.tbs / HEAD["ceilings_tbs"][ceiling]
        of_family = type(parse(row.spec.partition(";")[0])).__module__.split(".")[2]
        assert row.sm_mhz == 1980
        assert row.compile_s > 0 and row.rule and of_family in (op, benchmarks()[op][0].name)
        assert 0 < row.out_error < 1e-2 and row.peers and all((p.us, p.ratio) == (4.0, 0.5) for p in row.peers.values())
        if raw["host_us"]:
            assert row.host_us == row.host_bound_us == 1.0 and all(p.host_us == 1.0 for p in row.peers.values())
    assert any(row.host_us for row in found)
    assert json.loads(json.dumps(report)) == report, "nothing is lost where it is saved"
    assert clocks(report) == ["1980"] * len(report["rows"])
    for row in report["rows"]:
        row["sm_mhz"] = None
    assert rows.rows_of(report)[0].sm_mhz is None and clocks(report) == ["-"] * len(report["rows"])


def clocks(report) -> list[str]:
    """The cells below MHz."""
    found, at = [], 0
    for line in table.as_text(suite.Suite([report])).splitlines():
        if line.endswith("MHz  rule"):
            at = line.index("MHz")
        elif at and line.startswith(" "):
            found.append(line[at - 1 : at + 3].strip())
        else:
            at = 0
    return found


def test_the_clock_is_of_the_card_in_use(monkeypatch):
    nvml = SimpleNamespace(
        ClockType=SimpleNamespace(SM=1),
        init_v2=lambda: None,
        device_get_handle_by_uuid={"GPU-abc": 7}.__getitem__,
        device_get_clock_info=lambda handle, kind: {(7, 1): 1755}[handle, kind],
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", nvml)
    monkeypatch.setattr("cuda.bindings.nvml", nvml, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", [].pop)
    assert timing.sm_mhz() is None, "torch has no card"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid={3: "abc"}[index]))
    timing._handle.cache_clear()
    assert timing.sm_mhz() == 1755
    timing._handle.cache_clear()


def test_rows_of_what_was_measured():
    single, several, replay, chain, combine = load([MEASURED]).reports
    first, second = rows.rows_of(single)
    assert (first.case, first.size_of, first.size) == ("nemotron-h-8b, 16 heads, bf16 state", "batch", "1")
    assert first.case == second.case and second.size == "8" and first.op == "selective_state_update"
    assert first.share == pytest.approx(single["rows"][0]["ceiling_fraction"]) and first.out_error is None
    assert first.peers["flashinfer"].ratio == first.us / first.peers["flashinfer"].us
    assert rows.rows_of(several)[0].case == "nemotron-h-8b, 16 heads, bf16 state, 6 tokens, every state kept"
    assert rows.rows_of(several)[0].copy_ratio is rows.rows_of(several)[0].copy_us is rows.rows_of(several)[0].copy is None
    cases = rows.by_case(rows.rows_of(replay))
    assert [case.split(", ", 3)[3] for case in cases] == [
        "history of one step, 6 tokens, 3 accepted", "ring of 16, none write, 6 tokens, 3 accepted"]  # fmt: skip
    assert [[row.size for row in group] for group in cases.values()] == [["1", "256"]] * 2
    assert rows.rows_of(chain)[0].case.endswith("behind conv1d") and "part=fused" in rows.rows_of(chain)[0].spec
    hot, *_, cold = rows.rows_of(combine)
    assert (hot.case, hot.size_of, hot.size, hot.share) == ("dense, d_v 512, bf16, hot: in the L2 cache", "rows x splits", "16 x 64", None)
    assert (cold.case, cold.size) == ("dense, d_v 512, bf16, cold", "16384 x 32") and cold.share == pytest.approx(1.0, abs=0.02)
    assert list(hot.peers) == ["flashinfer"] and hot.copy == "multiplication"


def test_a_ring_that_writes_is_one_curve(bench):
    report = small_run("replay_selective_state_update", batches=(1, 4), windows=(16,), writing=(0.25,))
    assert [row["written"] for row in report["rows"]] == [0, 0.25]
    assert [row.case.split(", ")[3:5] for row in rows.rows_of(report)] == [["ring of 16", "25% write"]] * 2


def test_flat_rows_have_the_same_keys():
    suite = load([MEASURED])
    found = [row for report in suite.reports for row in rows.rows_of(report)]
    failure = rows.Failure("kda", "small", "batch", "3", "too late")
    flat = list(rows.flat(found, [failure]))
    assert len({tuple(row) for row in flat}) == 1 and len(flat) == len(found) + 1
    assert {"op", "case", "size", "us", "tbs", "share", "copy_ratio", "host_bound_us", "compile_s", "spec", "flashinfer_ratio"} <= flat[
        0
    ].keys()
    assert {k: v for k, v in flat[-1].items() if v is not None} == {
        "op": "kda", "case": "small", "size_of": "batch", "size": "3", "failed": "too late"}  # fmt: skip


# Cases that fail.


@costly(8)
@pytest.mark.parametrize("op", benchmarks())
def test_a_case_that_is_wrong_is_not_timed_and_the_others_are(op, bench):
    kind = Layer if op.endswith("_layer") else case.Case
    gate = kind.gate

    def wrong_at_first(one, **variant):
        if one is first_of(one):
            raise SsmgenError(f"{variant}: output error 0.5; not timed")
        return gate(one, **variant)

    firsts: list = []

    def first_of(one):
        firsts.append(one)
        return firsts[0]

    expected = len(small_run(op)["rows"])
    bench.setattr(kind, "gate", wrong_at_first)
    watch = Recording()
    report = small_run(op, watch)
    assert len(report["rows"]) == expected - 1 and len(report["failed"]) == 1
    (failure,) = rows.failures_of(report)
    assert failure.op == op and "output error 0.5" in failure.error and failure.case and failure.size
    assert failure.error.count("not timed") == 2, "both variants were tried"
    heard = [event[0] for event in watch.heard]
    assert watch.heard[0] == ("begins", op, expected) and heard == ["begins", "case", "ends"] + ["case", "timing", "ends"] * (expected - 1)
    assert watch.heard[2][1].startswith(watch.heard[1][1]) and "FAILED" in watch.heard[2][1]
    assert failure.words == f"{op} {watch.heard[1][1]}"
    assert table.as_text(suite.Suite([HEAD | report])).count("not timed: ") == 1


def test_too_little_memory_fails_the_case(bench):
    def full(at, device):
        raise torch.OutOfMemoryError("no room")

    bench.setattr(bench_of("kda"), "inputs", full)
    report = small_run("kda")
    assert not report["rows"] and [f["error"] for f in report["failed"]] == ["no room"] * 2
    assert "not timed: kda 4 heads" in table.as_text(suite.Suite([HEAD | report]))


def test_other_errors_are_not_hidden(bench):
    def broken(one, pdl):
        raise ZeroDivisionError

    bench.setattr(case.Case, "gate", broken)
    with pytest.raises(ZeroDivisionError):
        small_run("kda")


def test_the_command_names_what_failed_and_exits_with_1(bench):
    def wrong(one, pdl):
        raise SsmgenError("output error 0.5")

    bench.setattr(case.Case, "gate", wrong)
    run = bench_of("kda").run
    bench.setattr(bench_of("kda"), "run", lambda **options: run(**options | SMALL["kda"], device="cpu"))
    result = CliRunner().invoke(cli.main, ["bench", "kda"])
    assert result.exit_code == 1 and "2 not timed:" in result.stderr
    assert (
        "kda 4 heads of 16 x 16, 4 key heads, f32 state, batch 9: with PDL: output error 0.5; without PDL: output error 0.5"
        in result.stderr
    )
    assert "not timed: kda 4 heads" in result.stdout


# All operators.


def test_tasks():
    assert suite.tasks() == {op: {} for op in benchmarks()} and suite.tasks(quick=True) == {op: bench_of(op).quick for op in benchmarks()}
    mamba1, mamba2 = suite.tasks(model="mamba-130m"), suite.tasks(model="nemotron-h-8b", tp=8, quick=True)
    conv = ["causal_conv1d", "causal_conv1d_update"]
    assert list(mamba1) == [*conv, "selective_scan", "selective_state_update"] and mamba1["causal_conv1d_update"]["dim"] == 1536
    assert set(mamba2) == {"selective_state_update", "replay_selective_state_update", "chunk_scan", *conv, "gated_rms_norm", "mamba2_layer"}
    assert mamba2["mamba2_layer"] == {"names": ("nemotron-h-8b",), "tp": 8, "batches": (1, 64), "states": (DType.BF16,)}
    assert mamba2["gated_rms_norm"]["shapes"] == ((1, 1024),) and mamba2["gated_rms_norm"]["rows"] == (1, 128)
    assert mamba2["selective_state_update"] == {"names": ("nemotron-h-8b",), "tp": 8, "batches": (1, 16, 128)}
    assert mamba2["replay_selective_state_update"]["shape"] == (16, 64, 128, 1)
    wide = suite.tasks(model="olmo-hybrid-7b")["gated_delta_rule"]
    assert (wide["heads"], wide["key_heads"], wide["dim"], wide["value_dim"]) == (30, 30, 96, 192)
    rwkv7 = suite.tasks(model="rwkv7-0.1b")
    assert list(rwkv7) == ["chunk_linear_attention", "rwkv7"] and "key_heads" not in rwkv7["rwkv7"]
    with pytest.raises(ModelError):
        suite.tasks(model="mamba-131m")


@pytest.mark.parametrize(
    "work", [suite.tasks(quick=True), *(suite.tasks(model=m) for m in ("nemotron-h-8b", "olmo-hybrid-7b", "rwkv7-0.1b"))]
)
def test_tasks_are_what_benchmarks_take(work):
    for op, options in work.items():
        assert bench_of(op).points(**options)


def test_value_channels_of_their_own(bench):
    report = small_run("gated_delta_rule", value_dim=32, batches=(2,))
    (row,) = rows.rows_of(report)
    assert ",dim_k=16,dim_v=32," in row.spec.replace(":", ",") and row.case == "4 heads of 32 x 16, 2 key heads, bf16 state"


def test_all_goes_on_where_one_fails(bench):
    def broken(**options):
        raise RuntimeError("it fell over")

    work = {op: SMALL[op] | {"device": "cpu"} for op in ("selective_state_update", "kda", "causal_conv1d")}
    bench.setattr(bench_of("kda"), "run", broken)
    watch = Recording()
    found = suite.run(work, watch=watch)
    assert [r["op"] for r in found.reports] == ["selective_state_update", "causal_conv1d"]
    assert found.failed == [{"op": "kda", "error": "RuntimeError: it fell over"}]
    assert ("ends", "kda: FAILED: RuntimeError: it fell over") in watch.heard


def test_a_display_hears_of_operators_that_fail_before_their_first_case(bench):
    out = io.StringIO()
    display = Display(Console(file=out, force_terminal=True, width=120))
    bench.setattr(bench_of("kda"), "run", lambda **options: {}["nothing"])
    with display.progress:
        found = suite.run({"kda": {}, "causal_conv1d": SMALL["causal_conv1d"] | {"device": "cpu"}}, watch=display)
    assert len(found.reports) == len(found.failed) == 1 and "kda: FAILED: KeyError: 'nothing'" in out.getvalue()


def test_all_keeps_what_there_is_when_interrupted(bench):
    def interrupted(**options):
        raise KeyboardInterrupt

    bench.setattr(bench_of("kda"), "run", interrupted)
    found = suite.run({op: SMALL[op] | {"device": "cpu"} for op in ("selective_state_update", "kda", "causal_conv1d")}, watch=SILENT)
    assert [r["op"] for r in found.reports] == ["selective_state_update"]
    assert found.failed == [{"op": op, "error": "interrupted"} for op in ("kda", "causal_conv1d")]


@pytest.mark.parametrize("every", [False, True], ids=["one", "all"])
def test_an_interrupted_benchmark_keeps_the_cases_it_has(every, bench):
    """Ctrl-C in the second case of an operator."""
    own, measured = bench_of("causal_conv1d"), type(bench_of("causal_conv1d")).measured
    done = []

    def interrupted(self, *rest):
        if done:
            raise KeyboardInterrupt
        done.append(self)
        return measured(self, *rest)

    bench.setattr(type(own), "measured", interrupted)
    options = {op: SMALL[op] | {"device": "cpu"} for op in ("causal_conv1d", "kda")}
    run = own.run
    bench.setattr(own, "run", lambda **asked: run(**asked | options["causal_conv1d"]))
    bench.setattr(suite, "tasks", lambda quick, model, tp: options)
    result = CliRunner().invoke(cli.main, ["bench", "all" if every else "causal_conv1d", "--json"])
    saved = json.loads(result.stdout)
    (report,) = saved["reports"] if every else [saved]
    assert len(report["rows"]) == 1 and len(report["rows"]) + len(report["failed"]) == len(own.points(**SMALL["causal_conv1d"]))
    assert {entry["error"] for entry in report["failed"]} == {"not reached: the run was interrupted"}
    assert (saved["failed"] == [{"op": "kda", "error": "interrupted"}]) if every else ("failed" in saved)
    assert result.exit_code == 1 and "not reached: the run was interrupted" in result.stderr


def test_the_command_for_all(bench, tmp_path):
    def broken(**options):
        raise RuntimeError("it fell over")

    bench.setattr(suite, "tasks", lambda quick, model, tp: {op: SMALL[op] | {"device": "cpu"} for op in ("causal_conv1d", "kda")})
    saved = CliRunner().invoke(cli.main, ["bench", "all", "--quick", "--json"])
    assert saved.exit_code == 0 and [r["op"] for r in json.loads(saved.stdout)["reports"]] == ["causal_conv1d", "kda"]
    bench.setattr(bench_of("kda"), "run", broken)
    result = CliRunner().invoke(cli.main, ["bench", "all"])
    assert result.exit_code == 1 and "1 not timed:\n  - kda: RuntimeError: it fell over" in result.stderr
    assert "not timed: kda: RuntimeError" in result.stdout and "causal_conv1d\n\nchannel first, plain, width 4" in result.stdout


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_all_without_a_gpu_says_so():
    result = CliRunner().invoke(cli.main, ["bench", "all", "--quick"])
    assert result.exit_code == 1 and result.stderr == "SsmgenError: torch finds no CUDA device; bench needs one\n"
    for op in benchmarks():
        with pytest.raises(SsmgenError, match="torch finds no CUDA device; bench needs one"):
            bench_of(op).run()
    result = CliRunner().invoke(cli.main, ["bench", "all", "--tp", "2"])
    assert result.exit_code == 2 and "--tp is given without --model; expected both" in result.output
