"""The benchmarks, as far as they need no GPU: cases on CPU tensors, the byte model, what peers are called with, options, tables."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bench_cases import SILENT
from click.testing import CliRunner

import ssmgen
from ssmgen import cli, runtime
from ssmgen.bench import report, timing
from ssmgen.bench.progress import Watch
from ssmgen.errors import SsmgenError
from ssmgen.families.linear_attention import TIMED, bench
from ssmgen.families.selective_state_update import bench as selective_state_update
from ssmgen.spec import Arch, DType, PoolMode

pytestmark = pytest.mark.usefixtures("one_compile")

HEADS, DIM, SLOTS = 4, 8, 40
CASES = {
    "one": {},
    "split": {"pool": PoolMode.SPLIT},
    "several": {"tokens": 3},
    "several-split": {"tokens": 3, "pool": PoolMode.SPLIT},
    "kept": {"tokens": 3, "intermediates": True},
}


def case_of(
    op: str = "gated_delta_rule", dtype: torch.dtype = torch.float32, key_heads: int | None = None, batch: int = 5, **how
) -> bench.Case:
    torch.manual_seed(0)
    state = report.normal_pool(SLOTS, (HEADS, DIM, DIM), dtype, torch.device("cpu"))
    return bench.Case(op, state, key_heads or (HEADS if op == "rwkv7" else 2), batch, **how)


# Cases.


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
@pytest.mark.parametrize("op", bench.OPS)
def test_cases_are_legal_and_pass_the_gate(op, how):
    case = case_of(op, **how)
    state_error, out_error = case.gate()
    assert 0 < state_error < 1e-6 and 0 < out_error < 6e-3
    last = case.arguments(case.sets - 1)
    assert ssmgen.supported(case.function, **last, arch="sm_90a") == (True, [])
    assert case.function(**last).data_ptr() == last["out"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_rounded_states_pass_the_gate(dtype, how):
    state_error, _ = case_of(dtype=dtype, **how).gate()
    assert 1e-5 < state_error < report.GATE[dtype] + 1e-5


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_ring_cases_pass_the_gate_and_their_commit_is_the_update(op):
    case, plain = case_of(op, tokens=3, ring=True), case_of(op, tokens=3)
    case.gate()
    assert case.passes == 1 and torch.equal(case.state, plain.state)
    call = plain.arguments(0) | {n: case.operands[n][0] for n in case.operands} | case.weights | {"state_indices": case.slots[0]}
    plain.function(**call)
    case.function(**case.arguments(0))
    case.commit()(0)
    assert torch.equal(case.state, plain.state)


@pytest.mark.parametrize("broken", ["state", "out", "intermediate_states"])
def test_the_gate_stops_what_is_wrong(broken, monkeypatch):
    case = case_of(tokens=2, intermediates=broken == "intermediate_states")

    def wrong(**call):
        ssmgen.gated_delta_rule(**call)
        call[broken][case.slots[0, -1] if broken == "state" else -1] *= 1.1

    wrong.build = ssmgen.gated_delta_rule.build
    monkeypatch.setattr(bench.Case, "function", property(lambda _: wrong))
    with pytest.raises(SsmgenError, match=rf"{broken} error.*not timed"):
        case.gate()


def test_the_gate_sees_a_pool_that_should_not_have_changed(monkeypatch):
    case = case_of(tokens=2, intermediates=True)

    def wrong(**call):
        ssmgen.gated_delta_rule(**call | {"update_state": True})

    wrong.build = ssmgen.gated_delta_rule.build
    monkeypatch.setattr(bench.Case, "function", property(lambda _: wrong))
    with pytest.raises(SsmgenError, match="not timed"):
        case.gate()


def test_sets_have_slots_of_their_own_on_aligned_rows():
    for how, sets in ({}, 8), ({"pool": PoolMode.SPLIT}, 4):
        case = case_of(**how)
        drawn = [case.slots, *([] if case.targets is None else [case.targets])]
        assert case.sets == sets and torch.cat(drawn).unique().numel() == sets * 5 * len(drawn)
        assert all(row.is_contiguous() and (row.data_ptr() - drawn[0].data_ptr()) % 32 == 0 for rows in drawn for row in rows)
    assert case_of(batch=1).sets == SLOTS


def test_buffers_of_intermediate_states_are_as_many_as_fit(monkeypatch):
    each = 5 * 3 * HEADS * DIM * DIM * 4
    for budget, count in (1, 1), (3 * each, 3), (100 * each, 8):
        monkeypatch.setattr(bench, "POOL_BYTES", budget)
        assert len(case_of(tokens=3, intermediates=True).kept) == count


# The byte model.


def test_bytes():
    slot, batch = HEADS * DIM * DIM * 4, 5
    for how, passes in zip(CASES.values(), (2, 2, 2, 2, 4), strict=True):
        case = case_of(batch=batch, **how)
        assert case.passes == passes and case.state_bytes == passes * batch * slot
    per_token = 2 * (2 * 2 * DIM + 2 * HEADS * DIM + 2 * HEADS)  # q, k; v, out; g, beta
    assert case.io_bytes == 3 * batch * per_token + 2 * 4 * HEADS
    assert case_of("gla", batch=1).io_bytes == 2 * (2 * 2 * DIM + 2 * HEADS * DIM + HEADS * DIM)


def test_pool_holds_four_gib_or_four_batches():
    slot = 2 * 2**20
    assert [bench.pool_slots(slot, b, p) for b in (1, 1024) for p in PoolMode] == [2048, 2048, 4096, 8192]


def test_shapes_and_what_is_kept_by_default():
    assert bench.shape("gated_delta_rule", None, None, None) == (64, 16, 128)
    assert bench.shape("kda", None, None, None) == (32, 32, 128)
    assert bench.shape("kda", 8, None, 64) == (8, 8, 64) and bench.shape("kda", 8, 2, None) == (8, 2, 128)
    single, split = PoolMode
    assert [bench.keeps(None, t, p) for t, p in ((1, single), (2, single), (2, split))] == [False, True, False]
    assert not bench.keeps(False, 2, single) and not bench.keeps(True, 1, single)


# Peers.


@pytest.fixture
def called(monkeypatch):
    """What the peers' functions are called with."""
    calls: dict[str, dict] = {}

    def imported(module, name):
        return lambda *args, **kwargs: calls.update({f"{module}.{name}": kwargs})

    monkeypatch.setattr(report, "imported", imported)
    return calls


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_flashinfer_gets_the_same_call(called, how):
    torch.manual_seed(0)
    case = bench.Case("gated_delta_rule", torch.zeros(4, 2, 128, 128, dtype=torch.bfloat16), 1, 2, **how)
    call = bench.flashinfer(case)
    call(0)
    ((name, given),) = called.items()
    ours = case.arguments(0)
    assert name.endswith("gated_delta_rule" if case.tokens == 1 else "gated_delta_rule_mtp")
    pairs = {"a": "g", "b": "beta", "initial_state_source": "state", "initial_state_indices": "state_indices", "output": "out"}
    pairs |= {"output_state_indices": "dst_state_indices", "intermediate_states_buffer": "intermediate_states"}
    for theirs, own in (pairs | {n: n for n in ("q", "k", "v", "A_log", "dt_bias")}).items():
        assert (theirs in given) == (own in ours) and (theirs not in given or given[theirs].data_ptr() == ours[own].data_ptr())
    assert given["use_qk_l2norm_in_kernel"] is True and given.get("disable_state_update", False) is case.intermediates


def test_flashinfer_is_asked_only_for_what_it_has(called):
    assert bench.flashinfer(case_of(dtype=torch.bfloat16)) is None, "not of 128 x 128"
    assert bench.flashinfer(bench.Case("gated_delta_rule", torch.zeros(4, 2, 128, 128), 1, 2)) is None, "not in f32"
    assert bench.flashinfer(bench.Case("kda", torch.zeros(4, 2, 128, 128, dtype=torch.bfloat16), 1, 2)) is None


@pytest.mark.parametrize("op", bench.OPS)
def test_fla_gets_contiguous_f32_states(called, op):
    case = case_of(op, torch.bfloat16, key_heads=HEADS, batch=2)
    call = bench.fla(case)
    call(case.sets - 1)
    (given,) = called.values()
    assert given["initial_state"].shape == (2, HEADS, DIM, DIM) and given["initial_state"].dtype == torch.float32
    assert given["initial_state"].is_contiguous() and given["output_final_state"] is True
    assert set(case.operands) < set(given) and ("slope" in given, "beta_sigmoid" in given) == (False, False)
    call(0)
    first = case.state.data_ptr()
    assert called.popitem()[1]["initial_state"].data_ptr() == first


def test_fla_without_groups_is_left_out(called):
    assert bench.fla(case_of("gla")) is None and bench.fla(case_of("kda")) is not None


def test_a_missing_peer_is_silent_and_a_broken_one_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_peer.py").write_text("import no_such_dependency")
    (tmp_path / "old_peer.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert report.imported("no_such_peer.ops", "f") is None
    with pytest.warns(UserWarning, match="broken_peer is not timed: importing it raised ModuleNotFoundError.*no_such_dependency"):
        assert report.imported("broken_peer", "f") is None
    with pytest.warns(UserWarning, match="old_peer is not timed: importing it raised AttributeError"):
        assert report.imported("old_peer", "f") is None


def test_a_peer_that_does_not_run_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "capture", lambda call, sets, least: call(0))
    forgotten = []
    monkeypatch.setattr(report, "_forget_error", lambda: forgotten.append(1))

    def fails(i):
        raise NotImplementedError("only on Tuesdays")

    with pytest.warns(UserWarning, match="a is not timed: running it raised NotImplementedError: only on Tuesdays"):
        assert list(report.usable({"a": fails, "b": abs, "c": None})) == ["b"]
    assert len(forgotten) == 1


# Options.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["selective_state_update", "--tokens", "2", "--model", "mamba-130m"], "several tokens are for Mamba-2, not mamba-130m"),
        (["selective_state_update", "--intermediates"], "--intermediates needs --tokens"),
        (["selective_state_update", "--pool-mode", "split", "--no-intermediates"], "No such option"),
        (["kda", "--model", "mamba-130m"], "No such option"),
        (["rwkv7", "--key-heads", "4"], "rwkv7 does not take --key-heads"),
        (["gla", "--heads", "6", "--key-heads", "4"], "6 heads are not a multiple of 4 key heads"),
        (["gated_delta_rule", "--intermediates"], "--intermediates needs --tokens"),
        (["gla", "--ring"], "gla has no ring"),
        (["gated_delta_rule", "--intermediates", "--tokens", "2", "--pool-mode", "split"], "not with --pool-mode split"),
        (["gated_delta_rule", "--state", "f8"], "'f8' is not one of"),
        (["dplr_delta_rule"], "No such command"),
    ],
)
def test_options_that_do_not_apply_are_usage_errors(args, message):
    result = CliRunner().invoke(cli.main, ["bench", *args])
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_every_operator_can_be_asked_for():
    assert set(TIMED) == set(bench.OPS) and all(hasattr(ssmgen, op) for op in bench.OPS)


@pytest.mark.parametrize("op", ["gated_delta_rule", "selective_state_update"])
def test_options_reach_the_benchmark(op, monkeypatch):
    module, seen = (selective_state_update if op == "selective_state_update" else bench), {}
    monkeypatch.setattr(module, "run", lambda **options: seen.update(options) or {"rows": [], "failed": []})
    own = ["--tokens", "4"]
    own += ["--model", "mamba2-130m"] if module is selective_state_update else ["--pool-mode", "single", "--pool-mode", "split"]
    result = CliRunner().invoke(cli.main, ["bench", op, "--batch", "2", "--batch", "4", "--state", "f32", "--no-peers", "--json", *own])
    assert result.exit_code == 0, result.output
    assert (seen["batches"], seen["states"], seen["peers"], seen["rounds"]) == ((2, 4), (DType.F32,), False, 7)
    assert seen.get("names", ("mamba2-130m",)) == ("mamba2-130m",) and seen.get("pools", tuple(PoolMode)) == tuple(PoolMode)
    assert seen.get("tokens", (4,)) == (4,)


# Reports.


def row_of(**changes):
    us = {"ssmgen_pdl": 10.0, "ssmgen": 11.0, "copy_pdl": 9.5, "copy": 9.9, "flashinfer": 12.5, "fla": 50.0}
    row = {
        "op": "gated_delta_rule", "state": "bf16", "pool": "single", "tokens": 1, "intermediates": False,
        "ring": False, "batch": 8, "us": us,
        "served_us": 10.0, "tbs": 3.5, "copy_ratio": 10 / 9.5, "ceiling_fraction": 0.83, "peer_ratio": {"flashinfer": 0.8, "fla": 0.2},
        "host_us": {"ssmgen": 7.25, "ssmgen_bound": 3.5, "flashinfer": 17.5, "fla": 55.75}, "rule": "latency",
        "sm_mhz": 1755,
    }  # fmt: skip
    return row | changes


REPORT = {
    "device": "a GPU", "torch": "2", "compiler": "CL-1", "ceilings_tbs": {"in_place": 4.2}, "op": "gated_delta_rule", "heads": 64,
    "key_heads": 16, "dim": 128,
}  # fmt: skip


def test_table():
    several = row_of(tokens=4, intermediates=True, batch=128, host_us={}, copy_ratio=None, us={"ssmgen": 99.0}, peer_ratio={})
    lines = bench.table(REPORT | {"rows": [row_of(), several]}).splitlines()
    assert lines[:3] == [
        "a GPU, torch 2, NVRTC CL-1",
        "ceilings, TB/s: in_place 4.20",
        "gated_delta_rule: 64 heads, 16 key heads, K = V = 128",
    ]
    heading, first, second = lines[3:]
    expected = "bf16 single 1 no 8 10.00 3.50 0.83 11.00 9.50 1.053 12.50 0.80 50.00 0.20 7.25 3.50 17.5/55.8 - 1755 latency"
    assert " ".join(first.split()) == expected
    assert " ".join(second.split()) == "bf16 single 4 yes 128 10.00 3.50 0.83 99.00 - - - - - - - - - 1755 latency"
    assert heading.index("  rule") == first.index("  latency") == second.index("  latency")


def test_lines_of_progress():
    assert bench._line(row_of()) == "gated_delta_rule bf16 single T 1 batch 8: 10.00 us, 3.50 TB/s, 1.053 x copy"
    assert "T 4 kept batch 8: 10.00 us, 3.50 TB/s" in bench._line(row_of(tokens=4, intermediates=True, copy_ratio=None))


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Everything but the device and the clock."""
    monkeypatch.setattr(report, "begin", lambda method="": {"ceilings_tbs": {"in_place": 4.0}, "rows": [], "failed": []})
    monkeypatch.setattr(report, "normal_pool", lambda *args, make=report.normal_pool: make(*args[:-1], torch.device("cpu")))
    monkeypatch.setattr("ssmgen.families.slot_copy.bench.copy", lambda state, slots, pdl: lambda i: slots[i])
    monkeypatch.setattr(report, "usable", lambda peers: {name: call for name, call in peers.items() if call})
    monkeypatch.setattr(runtime, "device_arch", lambda index: Arch.parse("sm_90a"))
    monkeypatch.setattr(bench, "POOL_BYTES", 2**17)

    def device_us(contenders, sets, rounds):
        for launch in contenders.values():
            launch(0)
            launch(sets - 1)
        return {name: 2.0 + name.startswith("copy") for name in contenders}

    monkeypatch.setattr(timing, "device_us", device_us)
    monkeypatch.setattr(timing, "host_us", lambda call: call() is None or 1.0)


def test_run(without_a_gpu, monkeypatch):
    monkeypatch.setattr(bench, "PEERS", {"fla": lambda case: lambda i: case.out[i], "flashinfer": lambda case: None})
    said = []
    run = partial(bench.run, "gated_delta_rule", [DType.BF16, DType.F32], [1, 9], heads=4, key_heads=2, dim=16, watch=Watch(said.append))
    found = run([1, 2], list(PoolMode))
    rows = found["rows"]
    assert len(rows) == len(said) == 16 and (found["heads"], found["key_heads"], found["dim"]) == (4, 2, 16)
    assert [r["passes"] for r in rows[:8]] == [2, 2, 3, 3, 2, 2, 2, 2]
    for row in rows:
        assert row["served_us"] == row["us"]["ssmgen_pdl"] == 2.0 and set(row["us"]) == {"ssmgen_pdl", "ssmgen", "copy_pdl", "copy", "fla"}
        assert row["tbs"] == row["state_bytes"] / 2e6 and row["ceiling_fraction"] == row["tbs"] / 4
        assert row["copy_ratio"] == (2 / 3 if row["tokens"] == 1 else None) and row["peer_ratio"] == {"fla": 1.0}
        assert set(row["host_us"]) == ({"ssmgen", "ssmgen_bound", "fla"} if row["batch"] == 1 else set())
        assert row["spec"].startswith("linear_attention:") and row["rule"] and row["compile_seconds"] > 0
    assert len(bench.table(REPORT | found).splitlines()) == 4 + 16
    assert [r["passes"] for r in run([2], intermediates=False, peers=False)["rows"]] == [2] * 4


@pytest.mark.parametrize("op", [op for op in bench.OPS if op != "gated_delta_rule"])
def test_run_of_the_others(op, without_a_gpu):
    (row,) = bench.run(op, batches=[3], heads=4, dim=16, peers=False, watch=SILENT)["rows"]
    assert (row["op"], row["state"], row["batch"]) == (op, "f32", 3)


def test_run_of_selective_state_update(without_a_gpu, called, monkeypatch):
    monkeypatch.setattr(selective_state_update, "POOL_BYTES", 2**20)
    found = selective_state_update.run(["mamba-130m", "mamba2-130m"], [], [2], 1, True, SILENT)
    assert [sorted(row["us"]) for row in found["rows"]] == [
        ["copy", "copy_pdl", "mamba_ssm", "ssmgen", "ssmgen_pdl"],
        ["copy", "copy_pdl", "flashinfer", "mamba_ssm", "ssmgen", "ssmgen_pdl"],
    ]
    assert set(found["rows"][1]["host_us"]) == {"ssmgen", "ssmgen_bound", "flashinfer", "mamba_ssm"}
    assert found["rows"][0]["copy_ratio"] == 2 / 3 and found["rows"][0]["spec"].startswith("selective_state_update:")
    assert len(selective_state_update.table(REPORT | found).splitlines()) == 3 + 2


def test_run_of_selective_state_update_with_several_tokens(without_a_gpu, called, monkeypatch):
    monkeypatch.setattr(selective_state_update, "POOL_BYTES", 2**20)
    run = partial(selective_state_update.run, ["mamba2-130m"], [DType.F32, DType.BF16], [2], 1, True, SILENT)
    found = run(tokens=[1, 3], tp=4)
    assert [(row["tokens"], row["passes"], row["intermediates"], row["heads"]) for row in found["rows"]] == [
        (1, 2, False, 6), (3, 4, True, 6)] * 2  # fmt: skip
    assert [sorted(row["peer_ratio"]) for row in found["rows"]] == [["flashinfer", "mamba_ssm"], ["flashinfer"]] * 2
    for row in found["rows"][1::2]:
        assert row["spec"].startswith("selective_state_update:") and ",several=yes" in row["spec"] and row["copy_ratio"] is None
    (row,) = run(tokens=[2], intermediates=False)["rows"][:1]
    assert row["passes"] == 2 and row["copy_ratio"] == 2 / 3
    assert len(selective_state_update.table(REPORT | found).splitlines()) == 3 + 4


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_run_without_a_gpu_says_so():
    with pytest.raises(SsmgenError, match="bench needs a CUDA device"):
        bench.run("kda")
