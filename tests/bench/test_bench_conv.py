"""The convolutions' benchmarks, the parts that run without a GPU: cases on CPU tensors, the byte model, the peer's arguments, options."""

from __future__ import annotations

import weakref

import pytest
import torch
from bench_cases import BF16, F16, F32, SILENT, broken, on_the_cpu, recorded, small_case
from click.testing import CliRunner

import ssmgen
from ssmgen import cli
from ssmgen.bench import bench_of, case
from ssmgen.bench.case import keeping
from ssmgen.bench.progress import Watch
from ssmgen.errors import SsmgenError
from ssmgen.families.causal_conv1d import bench as forward
from ssmgen.families.causal_conv1d.bench import Form
from ssmgen.families.causal_conv1d.spec import ConvLayout
from ssmgen.families.causal_conv1d_update import bench as update
from ssmgen.families.causal_conv1d_update.bench import Innermost
from ssmgen.spec.kernel import DType, Loads

pytestmark = pytest.mark.usefixtures("one_compile")

FIRST, LAST = ConvLayout
SHAPE = (2, 24, 40)
DIM, SLOTS = 16, 30
TYPES = {F32: DType.F32, F16: DType.F16, BF16: DType.BF16}


def forward_case(form: Form = Form.PLAIN, layout: ConvLayout = FIRST, dtype: torch.dtype = BF16) -> case.Case:
    return small_case("causal_conv1d", 40_000, shape=SHAPE, layout=layout, form=form, dtype=TYPES[dtype])


def update_case(innermost: Innermost = Innermost.WINDOW, tokens: int = 1, batch: int = 5, dtype: torch.dtype = BF16, **how) -> case.Case:
    size = SLOTS * DIM * (2 + tokens) * dtype.itemsize
    return small_case("causal_conv1d_update", size, layout=innermost, tokens=tokens, batch=batch, dim=DIM, dtype=TYPES[dtype], **how)


# Cases.


@pytest.mark.parametrize("dtype", TYPES, ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ConvLayout)
@pytest.mark.parametrize("form", Form)
def test_prompts_are_legal_and_pass_the_gate(form, layout, dtype):
    one = forward_case(form, layout, dtype)
    errors = one.gate()
    assert errors.pop("out") < case.GATE[dtype] and one.sets > 2 and not any(errors.values())
    assert errors.keys() == {Form.VARLEN: {"conv_states"}, Form.STATES: {"final_states"}}.get(form, set())
    problem = ssmgen.explain(ssmgen.causal_conv1d, **one.arguments(one.sets - 1), arch="sm_90a").problem
    assert problem.layout is layout and (problem.seq_idx, problem.initial) == (form is Form.SEQ_IDX, form is Form.STATES)
    assert problem.shifted == (layout is FIRST and form in (Form.ODD, Form.VARLEN))
    assert (problem.loads is Loads.ELEMENT) == (layout is LAST and form is Form.ODD)
    assert problem.ragged == problem.pool == problem.started == (form is Form.VARLEN)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("innermost", Innermost)
def test_steps_are_legal_and_pass_the_gate(innermost, tokens, dtype):
    one = update_case(innermost, tokens, dtype=dtype)
    errors = one.gate()
    assert errors["out"] < case.GATE[dtype] and errors["conv_state"] == 0 and one.sets == SLOTS // 5
    problem = ssmgen.explain(ssmgen.causal_conv1d_update, **one.arguments(one.sets - 1), arch="sm_90a").problem
    assert (problem.layout.value, problem.tokens) == ("runs" if innermost is Innermost.WINDOW else "channels", tokens)
    assert problem.advance.value == ("roll" if tokens > 1 else "shift") and problem.loads is problem.taps is Loads.VECTOR


@pytest.mark.parametrize("form", [*Form, None])
@pytest.mark.parametrize("wrong", ["out", "conv_states"])
def test_the_gate_stops_what_is_wrong(form, wrong):
    one = forward_case(form) if form else update_case()
    name = {None: "conv_state", Form.STATES: "final_states_out"}.get(form, "conv_states") if wrong != "out" else "out"
    if name not in one.arguments(0):
        pytest.skip("of no states")
    broken(one, lambda call: call[name].mul_(1.1))
    with pytest.raises(SsmgenError, match=rf"{name.removesuffix('_out')} error [^0].*not timed"):
        one.gate()


@pytest.mark.parametrize("layout", ConvLayout)
def test_sets_share_nothing_but_weights(layout):
    one = forward_case(layout=layout)
    tensors = [one.rotating[name][i] for i in range(one.sets) for name in ("x", "out")]
    assert len({t.data_ptr() for t in tensors}) == 2 * one.sets
    one.beside["mul"](1)
    assert torch.equal(one.rotating["out"][1], one.rotating["x"][1])
    odd = forward_case(Form.ODD, layout)
    call = odd.arguments(0)
    assert call["x"].shape == call["out"].shape == (2, 24, 39) and odd.beside["mul"](0).numel() == 2 * 24 * 39


def test_slots_are_of_one_set_each():
    one = update_case()
    assert one.rotating["conv_state_indices"].unique().numel() == one.sets * 5 and update_case(batch=1).sets == SLOTS
    assert set(update_case(tokens=3).rotating["num_accepted_tokens"].unique().tolist()) == {1, 2, 3}
    before = one.shared["conv_state"].clone()
    assert one.beside["mul"](one.sets - 1).numel() == 5 * DIM * 4 and torch.equal(one.shared["conv_state"], before)


def test_bytes():
    assert forward_case().bytes == 2 * 2 * 24 * 40 * 2 and forward_case(Form.ODD).bytes == 2 * 2 * 24 * 39 * 2
    assert update_case().bytes == 16 * 5 * DIM and update_case(dtype=F32).bytes == 32 * 5 * DIM
    assert update_case(tokens=3).bytes == (6 + 3 + 5) * 2 * 5 * DIM


# The peer.


@pytest.fixture
def called(monkeypatch):
    return recorded(monkeypatch)


@pytest.mark.parametrize("form", Form)
def test_the_peer_gets_the_same_prompts(called, form):
    assert (forward.dao(forward_case(form)) is None) == (form not in (Form.PLAIN, Form.ODD))
    one = forward_case(form, LAST)
    call = forward.dao(one)
    assert (call is None) == (form is Form.VARLEN)
    if call:
        call(1)
        given = called["causal_conv1d.causal_conv1d_fn"]
        assert all(given[name] is value for name, value in one.arguments(1).items() if name != "out") and "out" not in given
        assert given["x"].stride(1) == 1


def test_the_peer_gets_the_same_steps(called):
    one = update_case()
    update.dao(one)(2)
    given, ours = called["causal_conv1d.causal_conv1d_update"], one.arguments(2)
    assert given["conv_state"] is ours["conv_state"] and torch.equal(given["conv_state_indices"], ours["conv_state_indices"])
    assert "out" not in given and update.dao(update_case(tokens=2)) is None


def test_what_the_peer_returns_is_kept_for_a_turn():
    made = []

    def function(n):
        result = torch.zeros(n)
        made.append(weakref.ref(result))
        return result

    call = keeping(function, [{"n": 1}, {"n": 2}])
    for i in (0, 1, 0):
        call(i)
    assert [result() is not None for result in made] == [False, True, True]


# Options.


def test_the_command_names_every_form_and_layout():
    for op, names in ("causal_conv1d", [f.value for f in Form]), ("causal_conv1d_update", [i.value for i in Innermost]):
        text = CliRunner().invoke(cli.main, ["bench", op, "--help"]).output
        assert f"[{'|'.join(names)}]" in text


# Reports.

US = ["causal_conv1d", "mul", "ssmgen", "ssmgen_pdl"]


def test_run_of_prompts(monkeypatch, called):
    on_the_cpu(monkeypatch)
    said = []
    found = bench_of("causal_conv1d").run(shapes=[SHAPE], forms=["plain", "varlen"], device="cpu", watch=Watch(said.append))
    rows = found["rows"]
    assert [(r["form"], r["layout"]) for r in rows] == [(f, layout.value) for f in ("plain", "varlen") for layout in ConvLayout]
    assert [sorted(r["us"]) for r in rows] == [US, US, US[1:], US[1:]] and len(said) == 4
    for row in rows:
        assert (row["served_us"], row["mul_ratio"], row["tbs"]) == (2.0, 0.5, row["bytes"] / 2e6) and row["out_error"] < 6e-3
        assert row["spec"].startswith("causal_conv1d:") and row["rule"] and row["compile_seconds"] > 0
    assert rows[0]["peer_ratio"] == {"causal_conv1d": 0.25} and set(rows[0]["host_us"]) == {"ssmgen", "ssmgen_bound", "causal_conv1d"}
    words = "channel first, plain, width 4, bf16, batch x channels x tokens 2 x 24 x 40"
    assert said[0] == f"{words}: 2.00 us, 0.00 TB/s, 0.500 x mul, 0.250 x causal_conv1d"


def test_run_of_steps(monkeypatch, called):
    on_the_cpu(monkeypatch)
    bench = bench_of("causal_conv1d_update")
    rows = bench.run(batches=[1, 9], tokens=[1, 2], dim=DIM, device="cpu", watch=SILENT)["rows"]
    assert [(r["layout"], r["tokens"], r["batch"]) for r in rows] == [(i.value, t, b) for i in Innermost for t in (1, 2) for b in (1, 9)]
    assert [sorted(r["us"]) for r in rows] == 2 * [US, US, US[1:], US[1:]]
    assert [bool(r["host_us"]) for r in rows] == 4 * [True, False]
    assert len(bench.run(batches=[1], dim=DIM, peers=False, device="cpu", watch=SILENT)["rows"][0]["us"]) == 3
