"""The benchmark of the replay functions, as far as it needs no GPU: cases on CPU tensors, what peers are called with, options, tables."""

from __future__ import annotations

import pytest
import torch
from bench_cases import SILENT
from click.testing import CliRunner

import ssmgen
from ssmgen import cli, runtime
from ssmgen.bench import report, timing
from ssmgen.bench.progress import Watch
from ssmgen.errors import SsmgenError
from ssmgen.families.replay_selective_state_update import bench, bench_case
from ssmgen.families.replay_selective_state_update.bench_case import PLAIN, Case, Form
from ssmgen.families.replay_selective_state_update.spec import History
from ssmgen.spec import Arch, DType, Loads

pytestmark = pytest.mark.usefixtures("one_compile")

SHAPE = (4, 16, 32, 2)
SM90, SM80 = Arch.parse("sm_90a"), Arch.parse("sm_80")


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr(bench_case, "STATE_BYTES", 100e3)
    torch.manual_seed(0)


def case_of(batch: int = 3, **how) -> Case:
    return Case(batch, **{"shape": SHAPE, "device": "cpu"} | how)


KINDS = {
    "step": {},
    "none-accepted": {"accepted": 0},
    "all-accepted": {"accepted": 6},
    "ring": {"window": 16},
    "ring-writing": {"window": 16, "writing": 1.0},
    "ring-some-write": {"window": 10, "writing": 0.4, "batch": 5},
    "conv": {"conv": True},
    "conv-ring": {"conv": True, "window": 16},
    "one-token": {"tokens": 1, "accepted": 1},
}

# Cases.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_cases_are_legal_and_pass_the_gate(how, dtype):
    case = case_of(**how, dtype=dtype)
    state_error, out_error = case.gate(PLAIN)
    assert state_error < bench_case.STATE_GATE[dtype] and 0 < out_error < 6e-3
    last = case.arguments(case.sets - 1)
    problem = ssmgen.explain(case.function, **last, arch="sm_90a").problem
    assert problem.history is (History.RING if case.window else History.STEP) and problem.after_conv == case.conv
    assert problem.state_loads is problem.operand_loads is Loads.VECTOR and problem.terms == 3
    assert ssmgen.supported(case.function, **case.arguments(0, Form(True, True, True)), arch="sm_90a") == (True, [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_rounded_cases_pass_the_gate(dtype):
    case = case_of(dtype=dtype, rounding=True)
    nearest, _ = case_of(dtype=dtype).gate(PLAIN)
    assert nearest < case.gate(PLAIN)[0] < bench_case.STATE_GATE[dtype] and case.arguments(0)["rand_seed"].numel() == 1


@pytest.mark.parametrize("broken", ["out", "state", "old_x", "old_B", "old_dt"])
@pytest.mark.parametrize("how", [{}, {"window": 16, "writing": 1.0}, {"conv": True}], ids=["step", "ring", "conv"])
def test_the_gate_stops_what_is_wrong(how, broken, monkeypatch):
    case = case_of(**how)
    function = case.function

    def wrong(**call):
        function(**call)
        call[broken].mul_(1.1)

    monkeypatch.setattr(Case, "function", property(lambda _: wrong))
    words = "history wrong" if broken.startswith("old") else rf"{'output' if broken == 'out' else broken} error .*e-0[12].*not timed"
    with pytest.raises(SsmgenError, match=words):
        case.gate(PLAIN)


def test_the_gate_stops_what_is_not_finite(monkeypatch):
    case = case_of()
    monkeypatch.setattr(Case, "function", property(lambda _: lambda **call: None))
    with pytest.raises(SsmgenError, match="output error inf"):
        case.gate(PLAIN)


def test_precision_is_what_the_gate_allows(monkeypatch):
    """A relative error of 2^-8 in the state passes as bf16 and not as f32."""
    for precision, passes in ("bf16", True), ("f32", False):
        case = case_of(dtype=torch.float32, precision=precision)
        function = type(case).function.fget(case)

        def coarse(function=function, **call):
            function(**call)
            call["state"].mul_(1 + 2.0**-8)

        monkeypatch.setattr(Case, "function", property(lambda _, coarse=coarse: coarse))
        if passes:
            case.gate(PLAIN)
        else:
            with pytest.raises(SsmgenError, match="not timed"):
                case.gate(PLAIN)
        monkeypatch.undo()
        monkeypatch.setattr(bench_case, "STATE_BYTES", 100e3)


def test_sets_share_no_slots_and_are_cold_enough():
    case = case_of()
    assert case.slots.unique().numel() == case.sets * 3 == len(case.state) and case.sets == -(-100000 // (3 * 4 * 16 * 32 * 2))
    assert case_of(64).sets == report.MIN_SETS and case_of(1, shape=(2, 8, 32, 1)).sets == 98
    tensors = [case.arguments(i)[n] for i in range(case.sets) for n in ("x", "B", "C", "dt", "out")]
    assert len({t.data_ptr() for t in tensors}) == 5 * case.sets


def test_bytes_and_the_share_that_writes():
    one = 4 * 16 * 32 * 2
    assert case_of().bytes_moved == 2 * 3 * one and case_of(accepted=0).bytes_moved == 3 * one
    assert case_of(window=16).written == 0 and case_of(window=16, writing=1.0).written == 1
    some = case_of(10, window=16, writing=0.3)
    assert some.written == pytest.approx(0.3) and some.bytes_moved == pytest.approx(13 * one)
    counts = some.history["prev_num_accepted_tokens"][some.slots.long()]
    assert sorted(counts[0].tolist()) == [3] * 7 + [11] * 3 and (counts == counts[0]).all()


def test_behind_the_convolution_operands_are_views_of_its_output():
    case = case_of(conv=True)
    call, conv = case.arguments(1), case.conv_arguments(1)
    base = conv["out"].untyped_storage().data_ptr()
    assert all(call[n].untyped_storage().data_ptr() == base for n in ("x", "B", "C")) and call["after_conv"]
    assert case.B.shape[-2:] == (2, 32) and call["x"].stride(1) == 4 * 16 + 2 * 2 * 32
    before = case.conv_out.clone()
    case.bound(PLAIN)(1)
    assert torch.equal(case.conv_out[0], before[0]) and not torch.equal(case.conv_out[1], before[1])


def test_forms():
    every = bench_case.forms(None, None, None, SM90)
    assert [f.name for f in every] == [
        "ssmgen_pdl", "ssmgen", "two_kernels_pdl_internal", "two_kernels_pdl", "two_kernels_internal", "two_kernels",
    ]  # fmt: skip
    assert every[0] == PLAIN and [f.name for f in bench_case.forms(None, None, None, SM80)] == ["ssmgen", "two_kernels"]
    assert [f.name for f in bench_case.forms(True, False, True, SM90)] == ["two_kernels_internal"]
    assert [f.name for f in bench_case.forms(False, True, None, SM90)] == ["ssmgen_pdl"]


# Peers.


@pytest.fixture
def called(monkeypatch):
    """What the peers' functions are called with."""
    calls: dict[str, dict] = {}
    monkeypatch.setattr(report, "imported", lambda module, name: lambda **kwargs: calls.update({name: kwargs}))
    return calls


def test_flashinfer_gets_the_same_call_on_a_ring_of_its_own(called):
    from inspect import signature

    from ssmgen.compat.flashinfer import checkpointing_ssu

    for window in (0, 16):
        case = case_of(window=window)
        bench.flashinfer(case)(1)
        given, ours = called["checkpointing_ssu"], case.arguments(1)
        signature(checkpointing_ssu).bind(**given)
        assert given["x_cache"].shape == (len(case.state), 4, (window or 6) + 6, 16)
        assert torch.equal(given["state_batch_indices"], ours["state_indices"])
        assert all(given[n] is ours[n] for n in ("state", "prev_num_accepted_tokens")) and torch.equal(given["x"], ours["x"])
        checkpointing_ssu(**given)  # and it is a legal call
        before, out = case.state.clone(), given["out"]
        assert checkpointing_ssu(**given) is out and torch.equal(before, case.state) == bool(window), "3 of 6 and 6 more outgrow 6, not 16"
    assert bench.flashinfer(case_of(window=20)) is bench.flashinfer(case_of(conv=True)) is bench.flashinfer(case_of(tokens=17)) is None
    bench.flashinfer(case_of(rounding=True))(0)
    assert called["checkpointing_ssu"]["rand_seed"].numel() == 1


def test_tensorrt_llm_gets_the_same_call(called):
    from ssmgen.compat.trtllm import replay_selective_state_update

    case = case_of()
    bench.tensorrt_llm(case)(2)
    given = called["replay_selective_state_update"]
    replay_selective_state_update(**given)
    assert (
        given["state_batch_indices"] is not None
        and bench.tensorrt_llm(case_of(window=16)) is bench.tensorrt_llm(case_of(conv=True)) is None
    )


# Options.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "1,2,3"], "is not four positive numbers such as 16,64,128,1"),
        (["--shape", "6,64,128,4"], "6 heads are not a multiple of 4 groups"),
        (["--accepted", "7"], "7 accepted of a step of 6 tokens"),
        (["--window", "8"], "3 + 6 tokens always outgrow a window of 8"),
        (["--window", "16", "--accepted", "17"], "17 accepted tokens in a window of 16"),
        (["--window", "4", "--accepted", "1"], "6 tokens do not fit into a window of 4"),
        (["--window", "0", "--writing", "0.5"], "--writing is of a ring"),
        (["--one-kernel", "--internal-pdl"], "--internal-pdl is of two kernels"),
        (["--rounding", "--state", "f32"], "an f32 state is not rounded"),
        (["--tokens", "33"], "33 is not in the range"),
        (["--writing", "2"], "2.0 is not in the range"),
        (["--precision", "tf32"], "'tf32' is not one of"),
    ],
    ids=lambda v: "".join(v) if isinstance(v, list) else None,
)
def test_options_that_do_not_apply_are_usage_errors(args, message):
    result = CliRunner().invoke(cli.main, ["bench", "replay_selective_state_update", *args])
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def options_of(monkeypatch, *args):
    seen = {}
    monkeypatch.setattr(bench, "run", lambda **options: seen.update(options) or {"rows": [], "failed": []})
    result = CliRunner().invoke(cli.main, ["bench", "replay_selective_state_update", *args, "--json", "--no-peers", "--rounds", "3"])
    assert result.exit_code == 0, result.output
    assert seen.pop("watch") and (seen.pop("peers"), seen.pop("rounds")) == (False, 3)
    return seen


def test_options_reach_the_benchmark(monkeypatch):
    several = {"states": (), "batches": (), "tokens": (), "accepted": (), "windows": (), "writing": ()}
    plain = several | {"shape": (16, 64, 128, 1), "rounding": False, "precision": "f32", "with_conv1d": False}
    plain |= dict.fromkeys(("two_kernels", "external_pdl", "internal_pdl"))
    assert options_of(monkeypatch) == plain
    args = ["--state", "f16", "--state", "bf16", "--batch", "2", "--tokens", "4", "--accepted", "1", "--accepted", "2", "--window", "9"]
    args += ["--writing", "1", "--shape", "8,32,64,2", "--rounding", "--precision", "bf16", "--with-conv1d", "--two-kernels"]
    wanted = {"states": (DType.F16, DType.BF16), "batches": (2,), "tokens": (4,), "accepted": (1, 2), "windows": (9,), "writing": (1.0,)}
    wanted |= {"shape": (8, 32, 64, 2), "rounding": True, "precision": "bf16", "with_conv1d": True, "two_kernels": True}
    wanted |= {"external_pdl": False, "internal_pdl": True}
    assert options_of(monkeypatch, *args, "--no-external-pdl", "--internal-pdl") == wanted
    assert options_of(monkeypatch, "--one-kernel")["two_kernels"] is False


# Reports.


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Everything but the device and the clock."""
    monkeypatch.setattr(report, "begin", lambda method="": REPORT | {"rows": [], "failed": []})
    monkeypatch.setattr(report, "usable", lambda peers: {name: call for name, call in peers.items() if call})
    monkeypatch.setattr(report, "slot_copies", lambda state, slots, pdls: {"copy": lambda i: state[slots[i].long()]})
    monkeypatch.setattr(runtime, "device_arch", lambda index: SM90)

    def device_us(contenders, sets, rounds):
        for launch in contenders.values():
            launch(0)
            launch(sets - 1)
        return {name: 2.0 + 2 * (name == "copy") + 6 * (name == "checkpointing_ssu" or name == "flashinfer") for name in contenders}

    monkeypatch.setattr(timing, "device_us", device_us)
    monkeypatch.setattr(timing, "host_us", lambda call: call() is None or 1.0)


REPORT = {"device": "a GPU", "torch": "2", "compiler": "CL-1", "ceilings_tbs": {"in_place": 4.2}}
WHERE = {"shape": SHAPE, "device": "cpu", "two_kernels": False}


def test_run(without_a_gpu, called):
    said = []
    found = bench.run(batches=[1, 9], accepted=[3, 0], **WHERE, watch=Watch(said.append))
    rows = found["rows"]
    assert [(r["window"], r["accepted"], r["batch"]) for r in rows] == [(w, k, b) for w in (0, 16) for k in (3, 0) for b in (1, 9)]
    assert [r["written"] for r in rows] == [1, 1, 0, 0, 0, 0, 0, 0] and len(said) == len(rows)
    ours = {"ssmgen_pdl", "ssmgen", "copy", "flashinfer"}
    assert [set(r["us"]) for r in rows] == [ours | {"tensorrt_llm"}] * 4 + [ours] * 4
    for row in rows:
        assert (row["served"], row["served_us"], row["copy_ratio"]) == ("ssmgen_pdl", 2.0, 0.5) and row["tbs"] == row["bytes"] / 2e6
        assert row["peer_ratio"]["flashinfer"] == 0.25 and row["compile_seconds"] > 0 and bool(row["host_us"]) == (row["batch"] == 1)
        assert (
            len(row["specs"]) == 1 and row["specs"][0].startswith("replay_selective_state_update:") and set(row["variants"]) == {"ssmgen"}
        )
    assert said[0] == "bf16 step T 6 K 3 batch 1: 2.00 us, 0.00 TB/s, 0.250 x flashinfer, 1.000 x tensorrt_llm"
    lines = bench.table(found).splitlines()
    assert len(lines) == 4 + 8 and lines[4].split()[:8] == ["bf16", "0", "6", "3", "1.00", "1", "2.00", "0.00"]
    assert all(line.index(f"  {row['rule']}") == lines[3].index("  rule") for line, row in zip(lines[4:], rows, strict=True))


def test_run_on_a_ring_whose_steps_write(without_a_gpu):
    rows = bench.run(batches=[4], windows=[0, 16], writing=[0.25, 1.0], **WHERE, peers=False, watch=SILENT)["rows"]
    assert [(r["window"], r["written"]) for r in rows] == [(0, 1.0), (16, 0.25), (16, 1.0)]
    assert rows[0]["peer_ratio"] == {} and set(rows[0]["us"]) == {"ssmgen_pdl", "ssmgen", "copy"}


def test_run_behind_the_convolution(without_a_gpu, called):
    found = bench.run(batches=[2], windows=[0], with_conv1d=True, **WHERE, watch=SILENT)
    (row,) = found["rows"]
    assert set(row["us"]) == {"ssmgen_pdl", "ssmgen", "conv1d_pdl", "conv1d", "copy"} and "behind conv1d" in bench.table(found)


def test_what_serves_two_kernels():
    case = case_of()
    found = bench.served(case, Form(True, True, True), SM90)
    assert len(found["specs"]) == 2 and ",part=precompute" in found["specs"][0] and found["compile_seconds"] > 0


def test_what_cannot_be_is_left_out():
    assert not bench.fits(6, 3, 0, 0.0) and not bench.fits(6, 3, 16, 0.0) and not bench.fits(6, 3, 6, 1.0)
    assert bench.fits(20, 3, 16, 0.0) and bench.fits(6, 12, 16, 0.0) and not bench.fits(6, 12, 16, 1.0)


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_run_without_a_gpu_says_so():
    with pytest.raises(SsmgenError, match="bench needs a CUDA device"):
        bench.run()
