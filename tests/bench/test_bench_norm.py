"""gated_rms_norm's benchmark, the parts that run without a GPU: cases on CPU tensors, the byte model, the peers' arguments, options."""

from __future__ import annotations

import pytest
import torch
from bench_cases import BF16, F32, broken, on_the_cpu, small_case

import ssmgen
from ssmgen.bench import bench_of, case, engine, report
from ssmgen.bench.progress import Watch
from ssmgen.errors import SsmgenError
from ssmgen.families.gated_rms_norm import bench
from ssmgen.families.gated_rms_norm.bench import BENCH, Form
from ssmgen.spec.kernel import DType

pytestmark = pytest.mark.usefixtures("one_compile")


def case_of(form: Form = Form.GDN, dtype: torch.dtype = BF16, hot: bool = False) -> case.Case:
    stored = DType.F32 if dtype is F32 else DType.BF16
    return small_case("gated_rms_norm", 30_000, rows=3, shape=(2, 64), form=form, dtype=stored, hot=hot)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("form", Form)
def test_cases_are_legal_and_pass_the_gate(form, dtype):
    one = case_of(form, dtype)
    assert one.gate()["out"] < case.GATE[dtype] and one.sets >= 4 and case_of(form, dtype, hot=True).sets == 1
    problem = ssmgen.explain(ssmgen.gated_rms_norm, **one.arguments(one.sets - 1), arch="sm_90a").problem
    assert (problem.size, problem.norm_first, problem.loads.value) == (64, form is not Form.MAMBA2, "vector")
    assert (problem.activation.value == "sigmoid") == (form is Form.KDA)
    assert one.peer_errors("torch.chain", bench.chain(one))["out"] < 2 * case.GATE[dtype]


@pytest.mark.parametrize("form", Form)
def test_the_gate_stops_what_is_wrong(form):
    one = case_of(form)
    broken(one, lambda call: call["out"].mul_(1.1))
    with pytest.raises(SsmgenError, match=r"out error .*e-0[12]; not timed"):
        one.gate()


def test_bytes():
    one = case_of(dtype=F32)
    assert one.bytes == 3 * 3 * 2 * 64 * 4
    product, call = one.beside["mul"](1), one.arguments(1)
    assert 3 * product.numel() * 4 == one.bytes and torch.equal(product, call["x"] * call["gate"])


@pytest.fixture
def packages(monkeypatch):
    """Functions that replace the peers', and their recorded arguments; `factor` makes their results wrong."""
    state = {"calls": {}, "factor": 1.0}

    def imported(module, name):
        def fla(x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6):
            state["calls"][name] = x, g, bias
            return ssmgen.gated_rms_norm(x, g, weight, eps, norm_before_gate=True, activation=activation) * state["factor"]

        def mamba_ssm(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
            state["calls"][name] = x, z, bias
            return ssmgen.gated_rms_norm(x, z, weight, eps, norm_before_gate=norm_before_gate, group_size=group_size) * state["factor"]

        return {"fla.modules.fused_norm_gate.rms_norm_gated": fla, "mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn": mamba_ssm}[
            f"{module}.{name}"
        ]

    monkeypatch.setattr(report, "imported", imported)
    monkeypatch.setattr(report, "usable", lambda peers: {name: call for name, call in peers.items() if call})
    return state


PEERS = {Form.MAMBA2: {"rmsnorm_fn"}, Form.GDN: {"rms_norm_gated", "rmsnorm_fn"}, Form.KDA: {"rms_norm_gated"}}


@pytest.mark.parametrize("form", Form)
def test_the_peers_get_the_same(packages, form):
    one = case_of(form)
    peers, ours = engine.peers_of(one, BENCH.peers), one.arguments(1)
    assert {name.partition(".")[2] for name in peers} == PEERS[form] | {"chain"}
    for call in peers.values():
        call(1)
    assert packages["calls"].keys() == PEERS[form]
    for x, gate, bias in packages["calls"].values():
        assert (x.data_ptr(), gate.data_ptr(), bias) == (ours["x"].data_ptr(), ours["gate"].data_ptr(), None)
    packages["factor"] = 1.1
    with pytest.warns(UserWarning, match="is not timed: checked, it raised SsmgenError: out error"):
        assert list(engine.peers_of(one, BENCH.peers)) == ["torch.chain"]


# Reports.


def test_run(packages, monkeypatch):
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(bench, "HOT", 10e3)
    said = []
    found = bench_of("gated_rms_norm").run(shapes=[(2, 64)], rows=[3, 30], device="cpu", watch=Watch(said.append))
    rows = found["rows"]
    assert len(said) == len(rows) == 3 * 3 and not found["failed"] and {r["form"] for r in rows} == {f.value for f in Form}
    assert {(r["hot"], r["rows"]) for r in rows} == {(True, 3), (False, 3), (False, 30)}
    for row in rows:
        assert (row["served_us"], row["mul_ratio"]) == (2.0, 0.5) and row["spec"].startswith("gated_rms_norm:")
        assert set(row["peer_ratio"].values()) == {0.25} and bool(row["host_us"]) == (row["rows"] == 3)
