"""gated_rms_norm's benchmark, as far as it needs no GPU: cases on CPU tensors, the byte model, what peers are called with, options."""

from __future__ import annotations

import pytest
import torch
from bench_cases import HEAD
from click.testing import CliRunner

import ssmgen
from ssmgen import cli, runtime
from ssmgen.bench import report, timing
from ssmgen.bench.progress import Watch
from ssmgen.errors import SsmgenError
from ssmgen.families.gated_rms_norm import bench
from ssmgen.families.gated_rms_norm.bench import Case, Form
from ssmgen.spec import Arch, DType

pytestmark = pytest.mark.usefixtures("one_compile")

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr(bench, "SET_BYTES", 30e3)
    torch.manual_seed(0)


def case_of(form: Form = Form.GDN, dtype: torch.dtype = BF16, hot: bool = False) -> Case:
    return Case(3, (2, 64), form, dtype, hot, "cpu")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("form", Form)
def test_cases_are_legal_and_pass_the_gate(form, dtype):
    case = case_of(form, dtype)
    assert case.gate() < report.GATE[dtype] and case.sets >= 4 and case_of(form, dtype, hot=True).sets == 1
    problem = ssmgen.explain(ssmgen.gated_rms_norm, **case.arguments(case.sets - 1), arch="sm_90a").problem
    assert (problem.size, problem.norm_first, problem.loads.value) == (64, form is not Form.MAMBA2, "vector")
    assert (problem.activation.value == "sigmoid") == (form is Form.KDA)
    assert case.error(case.chain(0)) < 2 * report.GATE[dtype]


@pytest.mark.parametrize("form", Form)
def test_the_gate_stops_what_is_wrong(form, monkeypatch):
    def wrong(**call):
        ssmgen.gated_rms_norm(**call).mul_(1.1)

    monkeypatch.setattr(Case, "function", property(lambda _: wrong))
    with pytest.raises(SsmgenError, match=r"output error .*e-0[12]; not timed"):
        case_of(form).gate()


def test_bytes():
    case = case_of(dtype=F32)
    assert case.bytes_moved == 3 * 3 * 2 * 64 * 4
    product = case.ceiling(1)
    assert 3 * product.numel() * 4 == case.bytes_moved and torch.equal(product, case.x[1] * case.z[1])


@pytest.fixture
def packages(monkeypatch):
    """Functions that do what the peers' do, and what they were called with; `factor` makes their results wrong."""
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
    monkeypatch.setattr(report, "usable", dict)
    return state


PEERS = {Form.MAMBA2: {"rmsnorm_fn"}, Form.GDN: {"rms_norm_gated", "rmsnorm_fn"}, Form.KDA: {"rms_norm_gated"}}


@pytest.mark.parametrize("form", Form)
def test_the_peers_get_the_same(packages, form):
    case = case_of(form)
    peers = bench.peers_of(case)
    assert {name.partition(".")[2] for name in peers} == PEERS[form] | {"chain"}
    for call in peers.values():
        assert call(1) is None
    assert packages["calls"].keys() == PEERS[form]
    for x, gate, bias in packages["calls"].values():
        assert (x.data_ptr(), gate.data_ptr(), bias) == (case.x[1].data_ptr(), case.z[1].data_ptr(), None)
    packages["factor"] = 1.1
    with pytest.warns(UserWarning, match="is not timed: checked, it raised SsmgenError: output error"):
        assert list(bench.peers_of(case)) == ["torch.chain"]


# Options and reports.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "1,2,3"], "is not two positive numbers such as 32,128"),
        (["--form", "gla"], "'gla' is not one of"),
        (["--rows", "0"], "0 is not in the range"),
        (["--batch", "2"], "No such option"),
    ],
)
def test_options_that_do_not_apply_are_usage_errors(args, message):
    result = CliRunner().invoke(cli.main, ["bench", "gated_rms_norm", *args])
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_options_reach_the_benchmark(monkeypatch):
    seen = {}
    monkeypatch.setattr(bench, "run", lambda **options: seen.update(options) or {"rows": [], "failed": []})
    args = ["--shape", "1,64", "--form", "kda", "--dtype", "f16", "--rows", "7", "--hot", "--json", "--no-peers"]
    result = CliRunner().invoke(cli.main, ["bench", "gated_rms_norm", *args])
    assert result.exit_code == 0, result.output
    wanted = {"shapes": ((1, 64),), "forms": ("kda",), "dtypes": (DType.F16,), "rows": (7,), "hot": True, "peers": False, "rounds": 7}
    assert seen.pop("watch") and seen == wanted


def test_run(packages, monkeypatch):
    monkeypatch.setattr(report, "begin", lambda method="": HEAD | {"rows": [], "failed": []})
    monkeypatch.setattr(runtime, "device_arch", lambda index: Arch.parse("sm_90a"))
    monkeypatch.setattr(timing, "host_us", lambda call: call() is None or 1.0)

    def device_us(contenders, sets, rounds):
        for launch in contenders.values():
            launch(sets - 1)
        return {name: 2.0 if name.startswith("ssmgen") else 4.0 if name == "mul" else 8.0 for name in contenders}

    monkeypatch.setattr(timing, "device_us", device_us)
    monkeypatch.setattr(bench, "HOT_BYTES", 10e3)
    said = []
    found = bench.run(shapes=[(2, 64)], rows=[3, 30], device="cpu", watch=Watch(said.append))
    rows = found["rows"]
    assert len(said) == len(rows) == 3 * 3 and not found["failed"] and {r["form"] for r in rows} == {f.value for f in Form}
    assert {(r["hot"], r["rows"]) for r in rows} == {(True, 3), (False, 3), (False, 30)}
    for row in rows:
        assert (row["served_us"], row["mul_ratio"]) == (2.0, 0.5) and row["spec"].startswith("gated_rms_norm:")
        assert set(row["peer_ratio"].values()) == {0.25} and bool(row["host_us"]) == (row["rows"] == 3)
    lines = bench.table(found).splitlines()
    assert len(lines) == 4 + len(rows) and lines[4].startswith("mamba2 3 x 2 x 64 bf16 hot")
    assert lines[3].index("  rule") == lines[4].index(f"  {rows[0]['rule']}")


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_run_without_a_gpu_says_so():
    with pytest.raises(SsmgenError, match="bench needs a CUDA device"):
        bench.run()
