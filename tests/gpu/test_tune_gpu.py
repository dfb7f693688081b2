"""Tuning on a card."""

from __future__ import annotations

import socket
import subprocess
import sys

import crew_cases
import pytest
import torch

import ssmgen
from ssmgen.bench import case as bench_case
from ssmgen.cache.store import Cache
from ssmgen.errors import SsmgenError
from ssmgen.families.combine_splits import bench as combine
from ssmgen.launch import runtime
from ssmgen.select import registry
from ssmgen.select import tuned as table
from ssmgen.select.catalog import parse
from ssmgen.spec.kernel import Arch
from ssmgen.tune import cases, search
from ssmgen.variants.build import build

pytestmark = pytest.mark.gpu


@pytest.fixture
def work(monkeypatch, tmp_path):
    """The smallest cases of one operator, and no tables yet."""
    monkeypatch.setenv("SSMGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(combine, "SHAPES", [(16, 2), (1024, 8)])
    monkeypatch.setattr(bench_case, "MOST", 64e6)
    registry.forget()
    yield lambda count: [case for case, _ in zip(cases.cases("combine_splits"), range(count), strict=False)]
    registry.forget()


def test_what_is_measured_is_served(work):
    bench, path = search.Bench.here(), table.overlay_path(torch.cuda.get_device_name())
    outcomes = search.tune(bench, work(2), path)
    assert [o.why for o in outcomes] == ["", ""] and all(0.3 < o.row.us <= o.row.rule_us for o in outcomes)
    assert all(o.row.runner_up for o in outcomes)
    n, splits, heads, d_v = 1, 2, 16, 128
    o, lse = torch.randn(splits, n, heads, d_v, device="cuda"), torch.randn(splits, n, heads, device="cuda")
    call = {"o": o, "lse": lse, "lse_base": 2, "out": torch.empty(n, heads, d_v, device="cuda", dtype=torch.bfloat16), "return_lse": True}
    found = ssmgen.explain(ssmgen.combine_splits, **call).chosen
    assert found.rule == "tuned" and str(found.spec) == outcomes[0].row.spec
    tuned = [t.clone() for t in ssmgen.combine_splits(**call, pdl=True)]
    ruled = ssmgen.combine_splits(**call, pdl=False)  # whose rows were not measured
    assert all(torch.equal(a, b) for a, b in zip(tuned, ruled, strict=True))
    assert [o.why for o in search.tune(bench, work(2), path)] == ["known", "known"]


def test_variants_whose_bits_differ_are_found(work, monkeypatch):
    (case,) = work(1)
    call = case.call(0)
    problem, size, _, pdl = call.problem()
    arch = runtime.device_arch(0)
    rule = registry.select("combine_splits", problem, size, arch, pdl)
    specs = search._promising(call, rule, search.Bench.here(), pdl)
    assert specs
    search.check_bits(call, rule, specs)
    launch_with = type(call).launch_with

    def wrong(self, spec):
        launch = launch_with(self, spec)
        if spec == specs[-1]:
            launch.arguments.values["to_log2"] *= 1.0001
            launch = runtime.Launch(launch.kernel, launch.device, launch.grid, launch.arguments.values)
        return launch

    monkeypatch.setattr(type(call), "launch_with", wrong)
    with pytest.raises(SsmgenError, match="This is a bug in ssmgen"):
        search.check_bits(call, rule, specs)


def test_the_tables_of_this_gpu_can_be_served(tmp_path):
    gpu = torch.cuda.get_device_name()
    rows = [row for row in table.rows_of(gpu).values() if not table.staleness(row)]
    if not rows:
        pytest.skip(f"there is no table of the {gpu}, or it is stale")
    todo = {(part, Arch.parse(row.arch)) for row in rows for spec in [parse(row.spec)] for part in spec.kernels}
    failed = [b for b in build(list(todo), Cache(tmp_path)) if b.error]
    assert not failed, failed[0].error


# Several processes. Norms compile fast; two sizes of one model's.
NORMS = ["tune", "gated_rms_norm", "--model", "qwen3-next-80b-a3b", "--batch", "1", "--batch", "64", "--budget", "5m"]


def started(folder, *command, **variables) -> subprocess.Popen[str]:
    env = crew_cases.environment(folder, **variables)
    return subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_on_one_card_are_refused(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "0"}
    words = ("-m", "ssmgen", *NORMS, "--out", str(tmp_path / "table.json"), "--lease", "5")
    processes = [started(tmp_path, *words, **where, RANK=str(n), LOCAL_RANK=str(n)) for n in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert 1 in [process.returncode for process in processes] and "share one card" in "".join(errors), errors


@pytest.mark.skipif("__import__('torch').cuda.device_count() < 2")
def test_two_cards_tune_what_one_tunes(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ssmgen")
    tables = []
    for name, command in {"one": ("-m", "ssmgen"), "two": torchrun}.items():
        path = tmp_path / f"{name}.json"
        process = started(tmp_path, *command, *NORMS, "--out", str(path))
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        tables.append(table.read(path))
    one, two = tables
    assert one.keys() == two.keys() and len(one) >= 2
    assert err.count("busy") == 2 and "by 2 processes in" in err
