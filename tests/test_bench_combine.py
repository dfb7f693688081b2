"""combine_splits' benchmark, as far as it needs no GPU: cases on CPU tensors, the byte model, what peers are called with, options."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

import ssmgen
from ssmgen import cli, runtime
from ssmgen.bench import report, timing
from ssmgen.bench.progress import Watch
from ssmgen.errors import SsmgenError
from ssmgen.families.combine_splits import bench
from ssmgen.families.combine_splits.bench import Case, Form
from ssmgen.families.combine_splits.reference import combine_splits as reference
from ssmgen.spec import Arch, DType

pytestmark = pytest.mark.usefixtures("one_compile")

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr(bench, "SET_BYTES", 200e3)
    monkeypatch.setattr(bench, "HEADS", 4)
    torch.manual_seed(0)


def case_of(form: Form = Form.DENSE, dtype: torch.dtype = F32, hot: bool = False) -> Case:
    return Case((12, 2 if form is Form.PAIR else 5), 64, form, dtype, hot, "cpu")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("form", Form)
def test_cases_are_legal_and_pass_the_gate(form, dtype):
    case = case_of(form, dtype)
    assert case.gate() < report.GATE[BF16] and case.sets > 2 and case_of(form, dtype, hot=True).sets == 1
    problem = ssmgen.explain(ssmgen.combine_splits, **case.arguments(case.sets - 1), arch="sm_90a").problem
    assert (problem.pair, problem.indexed, problem.axes) == (form is Form.PAIR, form is Form.PREFIX, 1 if form is Form.PAIR else 2)
    assert problem.loads.value == "vector" and problem.lse_out and problem.d_v == 64


@pytest.mark.parametrize("broken", ["out", "lse_out"])
@pytest.mark.parametrize("form", Form)
def test_the_gate_stops_what_is_wrong(form, broken, monkeypatch):
    case = case_of(form)

    def wrong(**call):
        ssmgen.combine_splits(**call)
        call[broken].mul_(1.1)

    monkeypatch.setattr(Case, "function", property(lambda _: wrong))
    with pytest.raises(SsmgenError, match=r"error .*e-0[12].*not timed"):
        case.gate()


def test_forms_hold_the_same_and_share_nothing():
    cases = [case_of(form) for form in (Form.DENSE, Form.PREFIX)]
    cases[1].memory[0].copy_(cases[0].memory[0])
    cases[1].s[0].copy_(cases[0].s[0].flatten(0, 1))
    for case in cases:
        ssmgen.combine_splits(**case.arguments(0))
    assert torch.equal(cases[0].out[0], cases[1].out[0]) and torch.equal(cases[0].lse_out[0], cases[1].lse_out[0])
    case = cases[0]
    tensors = [t for i in range(case.sets) for t in (case.v[i], case.s[i], case.out[i], case.lse_out[i])]
    assert len({t.data_ptr() for t in tensors}) == 4 * case.sets


def test_bytes():
    assert case_of().bytes_moved == 12 * (5 * (64 * 4 + 4) + 64 * 2 + 4)
    assert case_of(Form.PAIR, BF16).bytes_moved == 12 * (2 * (64 * 2 + 4) + 64 * 2 + 4)
    case = case_of()
    assert case.multiplication(1).numel() * 2 * 4 == case.bytes_moved and case.memory[0].numel() * 4 == case.bytes_moved
    assert torch.equal(case.reading(0), case.total) and case.total != 0


@pytest.fixture
def flashinfer(monkeypatch):
    """Functions that do what FlashInfer's do, and what they were called with; `factor` makes their results wrong."""
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
    assert bench.peers_of(case_of(form)) == {}  # values of 32 bits are none of its
    case = case_of(form, BF16)
    peers = bench.peers_of(case)
    assert list(peers) == [NAMES[form]] and peers[NAMES[form]](1) is None
    (given,) = flashinfer["calls"].values()
    assert given[0].data_ptr() == case.v[1].data_ptr() and given[1].data_ptr() == case.s[1].data_ptr()
    flashinfer["factor"] = 1.1
    with pytest.warns(UserWarning, match="is not timed: checked, it raised SsmgenError: output error"):
        assert bench.peers_of(case) == {}


# Options and reports.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "1,2,3"], "is not two positive numbers such as 128,16"),
        (["--shape", "0,2"], "is not two positive numbers"),
        (["--form", "even"], "'even' is not one of"),
        (["--d-v", "2048"], "2048 is not in the range"),
        (["--batch", "2"], "No such option"),
    ],
)
def test_options_that_do_not_apply_are_usage_errors(args, message):
    result = CliRunner().invoke(cli.main, ["bench", "combine_splits", *args])
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_options_reach_the_benchmark(monkeypatch):
    seen = {}
    monkeypatch.setattr(bench, "run", lambda **options: seen.update(options) or {"rows": [], "failed": []})
    args = ["--shape", "1,2", "--d-v", "64", "--form", "pair", "--dtype", "f16", "--hot", "--json", "--no-peers"]
    result = CliRunner().invoke(cli.main, ["bench", "combine_splits", *args])
    assert result.exit_code == 0, result.output
    wanted = {"shapes": ((1, 2),), "widths": (64,), "forms": ("pair",), "dtypes": (DType.F16,), "hot": True, "peers": False, "rounds": 7}
    assert seen.pop("watch") and seen == wanted


def test_run(flashinfer, monkeypatch):
    head = {"device": "a GPU", "torch": "2", "compiler": "CL-1", "ceilings_tbs": {"in_place": 4.2}}
    monkeypatch.setattr(report, "begin", lambda method="": head | {"rows": [], "failed": []})
    monkeypatch.setattr(runtime, "device_arch", lambda index: Arch.parse("sm_90a"))
    monkeypatch.setattr(timing, "host_us", lambda call: call() is None or 1.0)

    def device_us(contenders, sets, rounds):
        for launch in contenders.values():
            launch(sets - 1)
        return {name: {"mul": 4.0, "sum": 1.0}.get(name, 8.0 if "flashinfer" in name else 2.0) for name in contenders}

    monkeypatch.setattr(timing, "device_us", device_us)
    monkeypatch.setattr(bench, "HOT_BYTES", 20e3)
    said = []
    found = bench.run([(12, 2), (12, 5)], [64, 128], list(Form), device="cpu", watch=Watch(said.append))
    rows = found["rows"]
    assert len(said) == len(rows) and {r["form"] for r in rows} == {f.value for f in Form}
    assert all(r["shape"] == [12, 2] for r in rows if r["form"] == "pair")
    assert {(r["hot"], r["dtype"]) for r in rows} == {(h, d) for h in (True, False) for d in ("f32", "bf16")}
    assert not [r for r in rows if r["hot"] and r["shape"][1] * 12 * r["d_v"] * (4 if r["dtype"] == "f32" else 2) > 20e3]
    for row in rows:
        assert (row["served_us"], row["mul_ratio"], row["sum_ratio"]) == (2.0, 0.5, 2.0) and row["spec"].startswith("combine_splits:")
        assert list(row["peer_ratio"].values()) == ([0.25] if row["dtype"] == "bf16" else [])
    lines = bench.table(found).splitlines()
    assert len(lines) == 4 + len(rows) and lines[4].startswith("dense (12, 2) d_v 64 f32 hot")
    assert lines[3].index("  rule") == lines[4].index(f"  {rows[0]['rule']}")


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_run_without_a_gpu_says_so():
    with pytest.raises(SsmgenError, match="bench needs a CUDA device"):
        bench.run()
