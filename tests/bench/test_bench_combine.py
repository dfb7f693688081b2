"""combine_splits' benchmark, the parts that run without a GPU: cases on CPU tensors, the byte model, the peers' arguments, options."""

from __future__ import annotations

import pytest
import torch
from bench_cases import BF16, F32, broken, on_the_cpu, small_case

import ssmgen
from ssmgen.bench import bench_of, case, engine, report
from ssmgen.bench.progress import Watch
from ssmgen.errors import SsmgenError
from ssmgen.families.combine_splits import bench
from ssmgen.families.combine_splits.bench import BENCH, Form
from ssmgen.families.combine_splits.reference import combine_splits as reference
from ssmgen.spec.kernel import DType

pytestmark = pytest.mark.usefixtures("one_compile")


@pytest.fixture(autouse=True)
def few_heads(monkeypatch):
    monkeypatch.setattr(bench, "HEADS", 4)


def case_of(form: Form = Form.DENSE, dtype: torch.dtype = F32, hot: bool = False) -> case.Case:
    shape = (12, 2 if form is Form.PAIR else 5)
    stored = DType.F32 if dtype is F32 else DType.BF16
    return small_case("combine_splits", 200_000, shape=shape, d_v=64, form=form, dtype=stored, hot=hot)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("form", Form)
def test_cases_are_legal_and_pass_the_gate(form, dtype):
    one = case_of(form, dtype)
    errors = one.gate()
    assert (
        errors["out"] < case.GATE[BF16] and errors["lse_out"] < case.GATE[F32] and one.sets > 2 and case_of(form, dtype, hot=True).sets == 1
    )
    problem = ssmgen.explain(ssmgen.combine_splits, **one.arguments(one.sets - 1), arch="sm_90a").problem
    assert (problem.pair, problem.indexed, problem.axes) == (form is Form.PAIR, form is Form.PREFIX, 1 if form is Form.PAIR else 2)
    assert problem.loads.value == "vector" and problem.lse_out and problem.d_v == 64


@pytest.mark.parametrize("wrong", ["out", "lse_out"])
@pytest.mark.parametrize("form", Form)
def test_the_gate_stops_what_is_wrong(form, wrong):
    one = case_of(form)
    broken(one, lambda call: call[wrong].mul_(1.1))
    with pytest.raises(SsmgenError, match=rf"{wrong} error .*e-0[12].*not timed"):
        one.gate()


def test_forms_hold_the_same_and_share_nothing():
    dense, prefix = (case_of(form) for form in (Form.DENSE, Form.PREFIX))
    for name in ("v", "s"):
        prefix.more[name][0].copy_(dense.more[name][0].flatten(0, 1))
    found = [one.arguments(0) for one in (dense, prefix)]
    for call in found:
        ssmgen.combine_splits(**call)
    assert torch.equal(found[0]["out"], found[1]["out"]) and torch.equal(found[0]["lse_out"], found[1]["lse_out"])
    tensors = [dense.rotating[name][i] for i in range(dense.sets) for name in ("o", "lse", "out", "lse_out")]
    assert len({t.data_ptr() for t in tensors}) == 4 * dense.sets


def test_bytes():
    assert case_of().bytes == 12 * (5 * (64 * 4 + 4) + 64 * 2 + 4)
    assert case_of(Form.PAIR, BF16).bytes == 12 * (2 * (64 * 2 + 4) + 64 * 2 + 4)
    one = case_of()
    assert one.beside["mul"](1).numel() * 2 * 4 == one.bytes and one.beside["sum"](0) != 0


@pytest.fixture
def flashinfer(monkeypatch):
    """Functions that replace FlashInfer's, and their recorded arguments; `factor` makes their results wrong."""
    calls: dict[str, tuple] = {}
    state = {"calls": calls, "factor": 1.0}

    def imported(module, name):
        def function(*args):
            calls[f"{module}.{name}"] = args
            v, s, *rest = args
            if name == "merge_state":
                v, s = torch.stack([v, rest[0]]), torch.stack([s, rest[1]])
            if name == "merge_states":
                v, s = v.transpose(0, 1), s.transpose(0, 1)
            starts = rest[0] if name == "variable_length_merge_states" else None
            shape = v.shape[1:] if starts is None else (len(starts) - 1, *v.shape[1:])
            out, lse_out = v.new_empty(shape), s.new_empty(shape[:-1])
            reference(v, s, out=out, lse_out=lse_out, num_splits=starts, natural=False, natural_out=False)
            return out * state["factor"], lse_out

        return function

    monkeypatch.setattr(report, "imported", imported)
    monkeypatch.setattr(report, "usable", lambda peers: {name: call for name, call in peers.items() if call})
    return state


NAMES = {Form.DENSE: "flashinfer.merge_states", Form.PREFIX: "flashinfer.variable_length_merge_states", Form.PAIR: "flashinfer.merge_state"}


@pytest.mark.parametrize("form", Form)
def test_the_peer_gets_the_same(flashinfer, form):
    assert engine.peers_of(case_of(form), BENCH.peers) == {}  # the peer does not take 32-bit values
    one = case_of(form, BF16)
    peers = engine.peers_of(one, BENCH.peers)
    assert list(peers) == [NAMES[form]]
    peers[NAMES[form]](1)
    (given,) = flashinfer["calls"].values()
    assert given[0].data_ptr() == one.more["v"][1].data_ptr() and given[1].data_ptr() == one.more["s"][1].data_ptr()
    flashinfer["factor"] = 1.1
    with pytest.warns(UserWarning, match="is not timed: checked, it raised SsmgenError: out error"):
        assert engine.peers_of(one, BENCH.peers) == {}


# Reports.


def test_run(flashinfer, monkeypatch):
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(bench, "HOT", 20e3)
    said = []
    how = {"shapes": [(12, 2), (12, 5)], "widths": [64, 128], "forms": list(Form), "device": "cpu"}
    found = bench_of("combine_splits").run(**how, watch=Watch(said.append))
    rows = found["rows"]
    assert len(said) == len(rows) and {r["form"] for r in rows} == {f.value for f in Form}
    assert all(r["shape"] == [12, 2] for r in rows if r["form"] == "pair")
    assert {(r["hot"], r["dtype"]) for r in rows} == {(h, d) for h in (True, False) for d in ("f32", "bf16")}
    assert not [r for r in rows if r["hot"] and r["shape"][1] * 12 * r["d_v"] * (4 if r["dtype"] == "f32" else 2) > 20e3]
    for row in rows:
        assert (row["served_us"], row["mul_ratio"], row["sum_ratio"]) == (2.0, 0.5, 2.0) and row["spec"].startswith("combine_splits:")
        assert list(row["peer_ratio"].values()) == ([0.25] if row["dtype"] == "bf16" else [])
