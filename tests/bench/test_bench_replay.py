"""The benchmark of the replay functions, the parts that run without a GPU: cases on CPU tensors, the peers' arguments, options, tables."""

from __future__ import annotations

import pytest
import torch
from bench_cases import BF16, F16, F32, SILENT, broken, on_the_cpu, small_case

import ssmgen
from ssmgen.bench import bench_of, case, report
from ssmgen.bench.progress import Watch
from ssmgen.errors import SsmgenError
from ssmgen.families.replay_selective_state_update import bench
from ssmgen.families.replay_selective_state_update.spec import History
from ssmgen.spec.kernel import Arch, DType, Loads

pytestmark = pytest.mark.usefixtures("one_compile")

SHAPE = (4, 16, 32, 2)
SM90, SM80 = Arch.parse("sm_90a"), Arch.parse("sm_80")
STATES = {F32: DType.F32, F16: DType.F16, BF16: DType.BF16}


def case_of(batch: int = 3, dtype: torch.dtype = BF16, **how) -> case.Case:
    fields = {"shape": SHAPE, "window": 0, "state": STATES[dtype], "batch": batch}
    return small_case("replay_selective_state_update", 100_000, **fields | how)


KINDS = {
    "step": {},
    "none-accepted": {"accepted": 0},
    "all-accepted": {"accepted": 6},
    "ring": {"window": 16},
    "ring-writing": {"window": 16, "writing": 1.0},
    "ring-some-write": {"window": 10, "writing": 0.4, "batch": 5},
    "conv": {"with_conv1d": True},
    "conv-ring": {"with_conv1d": True, "window": 16},
    "one-token": {"tokens": 1, "accepted": 1},
}

# Cases.


@pytest.mark.parametrize("dtype", STATES, ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_cases_are_legal_and_pass_the_gate(how, dtype):
    case = case_of(**how, dtype=dtype)
    errors = case.gate()
    assert errors["state"] < bench.STATE_GATE[dtype] and 0 < errors["out"] < 6e-3 and errors["old_x"] == errors["old_B"] == 0
    last = case.arguments(case.sets - 1)
    problem = ssmgen.explain(case.function, **last, arch="sm_90a").problem
    assert problem.history is (History.RING if case.at.window else History.STEP) and problem.after_conv == case.at.with_conv1d
    assert problem.state_loads is problem.operand_loads is Loads.VECTOR and problem.terms == 3
    two = {"two_kernels": True, "internal_pdl": True, "pdl": True}
    assert ssmgen.supported(case.function, **case.arguments(0) | two, arch="sm_90a") == (True, [])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
def test_rounded_cases_pass_the_gate(dtype):
    case = case_of(dtype=dtype, rounding=True)
    nearest = case_of(dtype=dtype).gate()["state"]
    assert nearest < case.gate()["state"] < bench.STATE_GATE[dtype] and case.arguments(0)["rand_seed"].numel() == 1


@pytest.mark.parametrize("wrong", ["out", "state", "old_x", "old_B", "old_dt"])
@pytest.mark.parametrize("how", [{}, {"window": 16, "writing": 1.0}, {"with_conv1d": True}], ids=["step", "ring", "conv"])
def test_the_gate_stops_what_is_wrong(how, wrong):
    case = case_of(**how)
    broken(case, lambda call: call[wrong].mul_(1.1))
    with pytest.raises(SsmgenError, match=rf"{wrong} error .*e-0[12].*not timed"):
        case.gate()


def test_the_gate_stops_what_is_not_finite():
    case = case_of()
    build = case.function.build
    case.function = lambda **call: None
    case.function.build = build
    with pytest.raises(SsmgenError, match="out error inf"):
        case.gate()


def test_precision_is_what_the_gate_allows():
    """A relative error of 2^-8 in the state passes as bf16 and not as f32."""
    for precision, passes in ("bf16", True), ("f32", False):
        case = case_of(dtype=F32, precision=precision)
        broken(case, lambda call: call["state"].mul_(1 + 2.0**-8))
        if passes:
            case.gate()
        else:
            with pytest.raises(SsmgenError, match="not timed"):
                case.gate()


def test_sets_share_no_slots_and_are_cold_enough():
    one = case_of()
    slots = one.rotating["state_indices"]
    assert slots.unique().numel() == one.sets * 3 == len(one.shared["state"]) and one.sets == -(-100000 // (3 * 4 * 16 * 32 * 2))
    assert case_of(64).sets == case.MIN_SETS and case_of(1, shape=(2, 8, 32, 1)).sets == 98
    tensors = [call[n] for call in one.calls for n in ("x", "B", "C", "dt", "out")]
    assert len({t.data_ptr() for t in tensors}) == 5 * one.sets


def test_bytes_and_the_share_that_writes():
    one = 4 * 16 * 32 * 2
    assert case_of().bytes == 2 * 3 * one and case_of(accepted=0).bytes == 3 * one
    assert case_of(window=16).row["written"] == 0 and case_of(window=16, writing=1.0).row["written"] == 1
    some = case_of(10, window=16, writing=0.3)
    assert some.row["written"] == pytest.approx(0.3) and some.bytes == pytest.approx(13 * one)
    counts = some.shared["prev_num_accepted_tokens"][some.rotating["state_indices"].long()]
    assert sorted(counts[0].tolist()) == [3] * 7 + [11] * 3 and (counts == counts[0]).all()


def test_behind_the_convolution_operands_are_views_of_its_output():
    case = case_of(with_conv1d=True)
    call, conv = case.arguments(1), case.ahead.arguments(1)
    base = conv["out"].untyped_storage().data_ptr()
    assert all(call[n].untyped_storage().data_ptr() == base for n in ("x", "B", "C")) and call["after_conv"]
    assert call["B"].shape[-2:] == (2, 32) and call["x"].stride(1) == 4 * 16 + 2 * 2 * 32
    out = case.ahead.more["out"]
    before = out.clone()
    case.bound(pdl=True)(1)
    assert torch.equal(out[0], before[0]) and not torch.equal(out[1], before[1])


def test_forms():
    every = bench.forms(None, None, None, SM90)
    assert list(every) == [
        "ssmgen_pdl", "ssmgen", "two_kernels_pdl_internal", "two_kernels_pdl", "two_kernels_internal", "two_kernels",
    ]  # fmt: skip
    assert every["ssmgen_pdl"] == {"pdl": True} and list(bench.forms(None, None, None, SM80)) == ["ssmgen", "two_kernels"]
    assert bench.forms(True, False, True, SM90) == {"two_kernels_internal": {"pdl": False, "two_kernels": True, "internal_pdl": True}}
    assert list(bench.forms(False, True, None, SM90)) == ["ssmgen_pdl"]


# Peers.


@pytest.fixture
def called(monkeypatch):
    """The arguments of the peers' functions."""
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
        assert given["x_cache"].shape == (len(case.shared["state"]), 4, (window or 6) + 6, 16)
        assert torch.equal(given["state_batch_indices"], ours["state_indices"])
        assert all(given[n] is ours[n] for n in ("state", "prev_num_accepted_tokens")) and torch.equal(given["x"], ours["x"])
        checkpointing_ssu(**given)  # and it is a legal call
        state, out = case.shared["state"], given["out"]
        before = state.clone()
        assert checkpointing_ssu(**given) is out and torch.equal(before, state) == bool(window), "3 of 6 and 6 more outgrow 6, not 16"
    assert (
        bench.flashinfer(case_of(window=20)) is bench.flashinfer(case_of(with_conv1d=True)) is bench.flashinfer(case_of(tokens=17)) is None
    )
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
        and bench.tensorrt_llm(case_of(window=16)) is bench.tensorrt_llm(case_of(with_conv1d=True)) is None
    )


# Reports.


def run(**how) -> list[dict]:
    return bench_of("replay_selective_state_update").run(**{"shape": SHAPE, "device": "cpu", "two_kernels": False, "watch": SILENT} | how)[
        "rows"
    ]


def test_run(monkeypatch, called):
    on_the_cpu(monkeypatch)
    said = []
    rows = run(batches=[1, 9], accepted=[3, 0], watch=Watch(said.append))
    assert [(r["window"], r["accepted"], r["batch"]) for r in rows] == [(w, k, b) for w in (0, 16) for k in (3, 0) for b in (1, 9)]
    assert [r["written"] for r in rows] == [1, 1, 0, 0, 0, 0, 0, 0] and len(said) == len(rows)
    ours = {"ssmgen_pdl", "ssmgen", "copy", "copy_pdl", "flashinfer"}
    assert [set(r["us"]) for r in rows] == [ours | {"tensorrt_llm"}] * 4 + [ours] * 4
    for row in rows:
        assert (row["served"], row["served_us"], row["copy_ratio"]) == ("ssmgen_pdl", 2.0, 2 / 3) and row["tbs"] == row["bytes"] / 2e6
        assert row["peer_ratio"]["flashinfer"] == 0.25 and row["compile_seconds"] > 0 and bool(row["host_us"]) == (row["batch"] == 1)
        assert len(row["specs"]) == 1 and row["specs"][0].startswith("replay_selective_state_update:")
        assert set(row["variants"]) == {"ssmgen"} and row["best"] in row["us"] and row["copy_us"] == 3.0
    assert said[0].endswith("history of one step, 6 tokens, 3 accepted, batch 1: 2.00 us, 0.00 TB/s, 0.667 x copy, 0.250 x flashinfer, "
                            "0.250 x tensorrt_llm")  # fmt: skip


def test_run_on_a_ring_whose_steps_write(monkeypatch):
    on_the_cpu(monkeypatch)
    rows = run(batches=[4], windows=[0, 16], writing=[0.25, 1.0], peers=False)
    assert [(r["window"], r["written"]) for r in rows] == [(0, 1.0), (16, 0.25), (16, 1.0)]
    assert rows[0]["peer_ratio"] == {} and set(rows[0]["us"]) == {"ssmgen_pdl", "ssmgen", "copy", "copy_pdl"}


def test_run_behind_the_convolution(monkeypatch, called):
    on_the_cpu(monkeypatch)
    (row,) = run(batches=[2], windows=[0], with_conv1d=True)
    assert set(row["us"]) == {"ssmgen_pdl", "ssmgen", "conv1d_pdl", "conv1d", "copy", "copy_pdl"} and row["with_conv1d"]


def test_what_serves_two_kernels():
    found = bench.BENCH.served(case_of(), {"two_kernels": True, "internal_pdl": True, "pdl": True}, SM90)
    assert len(found["specs"]) == 2 and ",part=precompute" in found["specs"][0] and found["compile_seconds"] > 0


def test_what_cannot_be_is_left_out():
    assert not bench.fits(6, 3, 0, 0.0) and not bench.fits(6, 3, 16, 0.0) and not bench.fits(6, 3, 6, 1.0)
    assert bench.fits(20, 3, 16, 0.0) and bench.fits(6, 12, 16, 0.0) and not bench.fits(6, 12, 16, 1.0)
