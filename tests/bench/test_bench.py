"""The benchmarks of decode steps, the parts that run without a GPU: cases on CPU tensors, the byte model, the peers' arguments, options."""

from __future__ import annotations

import pytest
import torch
from bench_cases import BF16, F16, F32, SILENT, broken, on_the_cpu, recorded, small_case

import ssmgen
from ssmgen.bench import bench_of, case, report, rows, table, timing
from ssmgen.bench.progress import Watch
from ssmgen.bench.suite import Suite
from ssmgen.errors import SsmgenError
from ssmgen.families.linear_attention import TIMED, bench
from ssmgen.spec.kernel import DType, PoolMode

HEADS, DIM, BATCH = 4, 8, 5
SLOT = HEADS * DIM * DIM * 4
SPLIT = {"pool": PoolMode.SPLIT}

pytestmark = pytest.mark.usefixtures("one_compile")

CASES = {
    "one": {},
    "split": SPLIT,
    "several": {"tokens": 3, "intermediates": False},
    "several-split": {"tokens": 3, **SPLIT},
    "kept": {"tokens": 3},
}
STATES = {F32: DType.F32, F16: DType.F16, BF16: DType.BF16}


def case_of(op: str = "gated_delta_rule", dtype: torch.dtype = F32, key_heads: int | None = None, batch: int = BATCH, **how) -> case.Case:
    sizes = {"heads": HEADS, "key_heads": key_heads or (HEADS if op == "rwkv7" else 2), "dim": DIM}
    return small_case(op, 40 * SLOT * dtype.itemsize // 4, state=STATES[dtype], batch=batch, **sizes | how)


# Cases.


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
@pytest.mark.parametrize("op", bench.OPS)
def test_cases_are_legal_and_pass_the_gate(op, how):
    case = case_of(op, **how)
    errors = case.gate()
    assert 0 < errors.pop("out") < 6e-3 and all(error < 1e-6 for error in errors.values()) and max(errors.values()) > 0
    last = case.arguments(case.sets - 1)
    assert ssmgen.supported(case.function, **last, arch="sm_90a") == (True, [])
    assert case.function(**last).data_ptr() == last["out"].data_ptr()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_rounded_states_pass_the_gate(dtype, how):
    errors = case_of(dtype=dtype, **how).gate()
    assert 1e-5 < max(error for name, error in errors.items() if name != "out") < case.GATE[dtype] + 1e-5


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_ring_cases_pass_the_gate_and_their_commit_is_the_update(op):
    case, plain = case_of(op, tokens=3, ring=True), case_of(op, tokens=3, intermediates=False)
    case.gate()
    state, theirs = case.shared["state"], plain.shared["state"]
    assert case.row["passes"] == 1 and torch.equal(state, theirs)
    own = ("state_indices", *case.more["operands"])
    plain.function(**plain.arguments(0) | {n: case.arguments(0)[n] for n in own} | case.more["weights"])
    case.function(**case.arguments(0))
    case.beside["commit"](0)
    assert torch.equal(state, theirs)


@pytest.mark.parametrize("wrong", ["state", "out", "intermediate_states"])
def test_the_gate_stops_what_is_wrong(wrong):
    case = case_of(tokens=2, intermediates=wrong == "intermediate_states")
    last = case.arguments(0)["state_indices"][-1] if wrong == "state" else -1
    broken(case, lambda call: call[wrong][last].mul_(1.1))
    with pytest.raises(SsmgenError, match=rf"{wrong} error.*not timed"):
        case.gate()


def test_the_gate_sees_a_pool_that_should_not_have_changed():
    case = case_of(tokens=2)
    broken(case, lambda call: None, lambda call: call | {"update_state": True})
    with pytest.raises(SsmgenError, match="not timed"):
        case.gate()


def test_sets_have_slots_of_their_own_on_aligned_rows():
    for how, sets in ({}, 8), (SPLIT, 4):
        case = case_of(**how)
        drawn = [case.rotating[n] for n in ("state_indices", "dst_state_indices") if n in case.rotating]
        assert case.sets == sets and torch.cat(drawn).unique().numel() == sets * BATCH * len(drawn)
        assert all(row.is_contiguous() and (row.data_ptr() - drawn[0].data_ptr()) % 32 == 0 for rows in drawn for row in rows)
    assert case_of(batch=1).sets == 40


def test_buffers_of_intermediate_states_are_as_many_as_fit(monkeypatch):
    each = BATCH * 3 * SLOT
    for budget, count in (1, 1), (3 * each, 3), (100 * each, 8):
        monkeypatch.setattr(bench, "POOL_BYTES", budget)
        monkeypatch.setattr(bench, "slots_of", lambda *_: 40)
        assert len(case_of(tokens=3).rotating["intermediate_states"]) == count


# The byte model.


def test_bytes():
    for how, passes in zip(CASES.values(), (2, 2, 2, 2, 4), strict=True):
        case = case_of(**how)
        assert case.row["passes"] == passes and case.bytes == case.row["state_bytes"] == passes * BATCH * SLOT
    per_token = 2 * (2 * 2 * DIM + 2 * HEADS * DIM + 2 * HEADS)  # q, k; v, out; g, beta
    assert case.row["io_bytes"] == 3 * BATCH * per_token + 2 * 4 * HEADS
    assert case_of("gla", batch=1).row["io_bytes"] == 2 * (2 * 2 * DIM + 2 * HEADS * DIM + HEADS * DIM)


def test_pool_holds_four_gib_or_four_batches():
    assert [case.slots_of(2 * 2**20, draws, bench.POOL_BYTES) for draws in (1, 2, 1024, 2048)] == [2048, 2048, 4096, 8192]


def test_shapes_and_what_is_kept_by_default():
    def at(op="kda", **fields):
        (found,) = bench.BENCHES[op].points(batches=(1,), **fields)
        return found

    def shape(*args, **fields):
        found = at(*args, **fields)
        return found.heads, found.key_heads, found.dim

    assert shape("gated_delta_rule") == (64, 16, 128) and shape() == (32, 32, 128)
    assert shape(heads=8, dim=64) == (8, 8, 64) and shape(heads=8, key_heads=2) == (8, 2, 128)
    kept = [at(tokens=(t,), pools=(p,)).intermediates for t, p in ((1, PoolMode.SINGLE), (2, PoolMode.SINGLE), (2, PoolMode.SPLIT))]
    assert kept == [False, True, False]
    assert not at(tokens=(2,), intermediates=False).intermediates and not at(tokens=(1,), intermediates=True).intermediates
    with pytest.raises(TypeError, match="kda has no option batch"):
        at(batch=3)


# Peers.


@pytest.fixture
def called(monkeypatch):
    return recorded(monkeypatch)


def wide(op: str = "gated_delta_rule", state: DType = DType.BF16, **how) -> case.Case:
    return small_case(op, 4 * 2 * 128 * 128 * 2, state=state, heads=2, key_heads=1, dim=128, batch=2, **how)


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_flashinfer_gets_the_same_call(called, how):
    case = wide(**how)
    bench.flashinfer(case)(0)
    ((name, given),) = called.items()
    ours = case.arguments(0)
    assert name.endswith("gated_delta_rule" if case.at.tokens == 1 else "gated_delta_rule_mtp")
    pairs = {"a": "g", "b": "beta", "initial_state_source": "state", "initial_state_indices": "state_indices", "output": "out"}
    pairs |= {"output_state_indices": "dst_state_indices", "intermediate_states_buffer": "intermediate_states"}
    for theirs, own in (pairs | {n: n for n in ("q", "k", "v", "A_log", "dt_bias")}).items():
        assert (theirs in given) == (own in ours) and (theirs not in given or given[theirs].data_ptr() == ours[own].data_ptr())
    assert given["use_qk_l2norm_in_kernel"] is True and given.get("disable_state_update", False) is case.at.intermediates


def test_flashinfer_is_asked_only_for_what_it_has(called):
    assert bench.flashinfer(case_of(dtype=BF16)) is None, "not of 128 x 128"
    assert bench.flashinfer(wide(state=DType.F32)) is None and bench.flashinfer(wide("kda")) is None


@pytest.mark.parametrize("op", bench.OPS)
def test_fla_gets_contiguous_f32_states(called, op):
    case = case_of(op, BF16, key_heads=HEADS, batch=2)
    call = bench.fla(case)
    call(case.sets - 1)
    (given,) = called.values()
    assert given["initial_state"].shape == (2, HEADS, DIM, DIM) and given["initial_state"].dtype == F32
    assert given["initial_state"].is_contiguous() and given["output_final_state"] is True
    assert set(case.more["operands"]) < set(given) and ("slope" in given, "beta_sigmoid" in given) == (False, False)
    call(0)
    assert called.popitem()[1]["initial_state"].data_ptr() == case.shared["state"].data_ptr()


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


def test_every_operator_can_be_asked_for():
    assert set(TIMED) == set(bench.OPS) and all(hasattr(ssmgen, op) for op in bench.OPS)


# Reports.


def test_run(called, monkeypatch):
    on_the_cpu(monkeypatch)
    kinds = bench.BENCHES["gated_delta_rule"]
    monkeypatch.setattr(kinds, "peers", {"fla": lambda case: lambda i: case.arguments(i)["out"], "flashinfer": lambda case: None})
    said = []
    how = {"states": [DType.BF16, DType.F32], "batches": [1, 9], "heads": 4, "key_heads": 2, "dim": 16, "device": "cpu"}
    found = kinds.run(**how, tokens=[1, 2], pools=list(PoolMode), watch=Watch(said.append))
    measured = found["rows"]
    assert len(measured) == len(said) == 16 and (found["heads"], found["key_heads"], found["dim"]) == (4, 2, 16)
    assert [r["passes"] for r in measured[:8]] == [2, 2, 3, 3, 2, 2, 2, 2]
    for row in measured:
        assert row["served_us"] == row["us"]["ssmgen_pdl"] == 2.0 and set(row["us"]) == {"ssmgen_pdl", "ssmgen", "copy_pdl", "copy", "fla"}
        assert row["tbs"] == row["state_bytes"] / 2e6 and row["ceiling_fraction"] == row["tbs"] / 4
        assert row["copy_ratio"] == (2 / 3 if row["tokens"] == 1 else None) and row["peer_ratio"] == {"fla": 0.25}
        assert set(row["host_us"]) == ({"ssmgen", "ssmgen_bound", "fla"} if row["batch"] == 1 else set())
        assert row["spec"].startswith("linear_attention:") and row["rule"] and row["compile_seconds"] > 0
    assert said[0] == "4 heads of 16 x 16, 2 key heads, bf16 state, batch 1: 2.00 us, 0.00 TB/s, 0.667 x copy, 0.250 x fla"
    assert "x copy" not in said[2] and "2 tokens, every state kept, batch 1" in said[2]
    text = table.as_text(Suite([found]))
    assert text.count("batch") == 8 and text.splitlines()[-1].split()[:2] == ["9", "2.00"]
    kept = kinds.run(**how, tokens=[2], intermediates=False, peers=False, watch=SILENT)["rows"]
    assert [r["passes"] for r in kept] == [2] * 4


@pytest.mark.parametrize("op", [op for op in bench.OPS if op != "gated_delta_rule"])
def test_run_of_the_others(op, monkeypatch):
    on_the_cpu(monkeypatch)
    (row,) = bench_of(op).run(batches=[3], heads=4, dim=16, peers=False, watch=SILENT, device="cpu")["rows"]
    assert (row["op"], row["state"], row["batch"]) == (op, "f32", 3)


def ssu(**how) -> dict:
    return bench_of("selective_state_update").run(**{"batches": [2], "rounds": 1, "watch": SILENT, "device": "cpu"} | how)


def test_run_of_selective_state_update(called, monkeypatch):
    on_the_cpu(monkeypatch)
    found = ssu(names=["mamba-130m", "mamba2-130m"])
    assert [sorted(row["us"]) for row in found["rows"]] == [
        ["copy", "copy_pdl", "mamba_ssm", "ssmgen", "ssmgen_pdl"],
        ["copy", "copy_pdl", "flashinfer", "mamba_ssm", "ssmgen", "ssmgen_pdl"],
    ]
    assert set(found["rows"][1]["host_us"]) == {"ssmgen", "ssmgen_bound", "flashinfer", "mamba_ssm"}
    assert found["rows"][0]["copy_ratio"] == 2 / 3 and found["rows"][0]["spec"].startswith("selective_state_update:")
    with pytest.raises(SsmgenError, match=r"is not decoded by selective_state_update; expected a Mamba model"):
        ssu(names=["rwkv7-1.5b"])


def test_run_of_selective_state_update_with_several_tokens(called, monkeypatch):
    on_the_cpu(monkeypatch)
    names, states = ["mamba2-130m"], [DType.F32, DType.BF16]
    found = ssu(names=names, states=states, tokens=[1, 3], tp=4)
    assert [(row["tokens"], row["passes"], row["intermediates"], row["heads"]) for row in found["rows"]] == [
        (1, 2, False, 6), (3, 4, True, 6)] * 2  # fmt: skip
    assert [sorted(row["peer_ratio"]) for row in found["rows"]] == [["flashinfer", "mamba_ssm"], ["flashinfer"]] * 2
    for row in found["rows"][1::2]:
        assert row["spec"].startswith("selective_state_update:") and ",several=yes" in row["spec"] and row["copy_ratio"] is None
    (row,) = ssu(names=names, states=states, tokens=[2], intermediates=False)["rows"][:1]
    assert row["passes"] == 2 and row["copy_ratio"] == 2 / 3


def test_default_models_have_their_own_states():
    bench = bench_of("selective_state_update")

    def cases(**how):
        return list(dict.fromkeys((at.model, at.state.value) for at in bench.points(**how)))

    all_four = [("nemotron-h-8b", "bf16"), ("nemotron-h-8b", "f32"), ("mamba-130m", "f32"), ("falcon-mamba-7b", "f32")]
    assert cases() == all_four and cases(states=(DType.BF16,)) == all_four[:1] and cases(states=(DType.F32,)) == all_four[1:]
    assert cases(names=("mamba-130m",), states=(DType.BF16,)) == [("mamba-130m", "bf16")]
    assert {rows.Point("", "batch", bench.size({"batch": at.batch}), None).size for at in bench.points()} >= {"1", "256"}
