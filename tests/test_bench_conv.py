"""The convolutions' benchmarks, as far as they need no GPU: cases on CPU tensors, the byte model, what the peer is called with, options."""

from __future__ import annotations

import weakref

import pytest
import torch
from bench_cases import SILENT
from click.testing import CliRunner

import ssmgen
from ssmgen import cli, runtime
from ssmgen.bench import report, timing
from ssmgen.bench.multiplied import keeping
from ssmgen.bench.progress import Watch
from ssmgen.errors import SsmgenError
from ssmgen.families.causal_conv1d import bench as forward
from ssmgen.families.causal_conv1d.bench import Form
from ssmgen.families.causal_conv1d.spec import ConvLayout
from ssmgen.families.causal_conv1d_update import bench as update
from ssmgen.families.causal_conv1d_update.bench import Innermost
from ssmgen.spec import Arch, DType, Loads

pytestmark = pytest.mark.usefixtures("one_compile")

FIRST, LAST = ConvLayout
SHAPE = (2, 24, 40)
DIM, SLOTS = 16, 30


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr(forward, "SET_BYTES", 40e3)
    monkeypatch.setattr(update, "POOL_BYTES", 10e3)
    torch.manual_seed(0)


def forward_case(form: Form = Form.PLAIN, layout: ConvLayout = FIRST, dtype: torch.dtype = torch.bfloat16) -> forward.Case:
    return forward.Case(SHAPE, layout, form, dtype=dtype, device="cpu")


def update_case(
    innermost: Innermost = Innermost.WINDOW, tokens: int = 1, batch: int = 5, dtype: torch.dtype = torch.bfloat16
) -> update.Case:
    entries = 2 + tokens
    inner = (DIM, entries) if innermost is Innermost.WINDOW else (entries, DIM)
    return update.Case(report.normal_pool(SLOTS, inner, dtype, "cpu"), innermost, batch, tokens)


CASES = [forward_case, update_case]

# Cases.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ConvLayout)
@pytest.mark.parametrize("form", Form)
def test_prompts_are_legal_and_pass_the_gate(form, layout, dtype):
    case = forward_case(form, layout, dtype)
    assert case.gate() < report.GATE[dtype] and case.sets > 2
    problem = ssmgen.explain(ssmgen.causal_conv1d, **case.arguments(case.sets - 1), arch="sm_90a").problem
    assert problem.layout is layout and (problem.seq_idx, problem.initial) == (form is Form.SEQ_IDX, form is Form.STATES)
    assert problem.shifted == (layout is FIRST and form in (Form.ODD, Form.VARLEN))
    assert (problem.loads is Loads.ELEMENT) == (layout is LAST and form is Form.ODD)
    assert problem.ragged == problem.pool == problem.started == (form is Form.VARLEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("innermost", Innermost)
def test_steps_are_legal_and_pass_the_gate(innermost, tokens, dtype):
    case = update_case(innermost, tokens, dtype=dtype)
    assert case.gate() < report.GATE[dtype] and case.sets == SLOTS // 5
    problem = ssmgen.explain(ssmgen.causal_conv1d_update, **case.arguments(case.sets - 1), arch="sm_90a").problem
    assert (problem.layout.value, problem.tokens) == ("runs" if innermost is Innermost.WINDOW else "channels", tokens)
    assert problem.advance.value == ("roll" if tokens > 1 else "shift") and problem.loads is problem.taps is Loads.VECTOR


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("broken", ["out", "state"])
def test_the_gate_stops_what_is_wrong(make, broken, monkeypatch):
    case = make(Form.VARLEN) if make is forward_case else make()
    function, state = case.function, "conv_states" if make is forward_case else "conv_state"

    def wrong(**call):
        function(**call)
        call[state if broken == "state" else "out"].mul_(1.1)

    monkeypatch.setattr(type(case), "function", property(lambda _: wrong))
    with pytest.raises(SsmgenError, match="states wrong; not timed" if broken == "state" else r"output error .*e-0[12].*not timed"):
        case.gate()


@pytest.mark.parametrize("layout", ConvLayout)
def test_sets_share_nothing_but_weights(layout):
    case = forward_case(layout=layout)
    tensors = [t for i in range(case.sets) for t in (case.x[i], case.out[i])]
    assert len({t.data_ptr() for t in tensors}) == 2 * case.sets
    case.ceiling(1)
    assert torch.equal(case.out[1], case.x[1])
    odd = forward_case(Form.ODD, layout)
    assert odd.x[0].shape == odd.out[0].shape == (2, 24, 39) and odd.ceiling(0).numel() == odd.numel


def test_slots_are_of_one_set_each():
    case = update_case()
    assert case.slots.unique().numel() == case.sets * 5
    assert update_case(batch=1).sets == SLOTS and set(update_case(tokens=3).accepted.unique().tolist()) == {1, 2, 3}
    before = case.pool.clone()
    assert case.ceiling(case.sets - 1).numel() == 5 * DIM * 4 and torch.equal(case.pool, before)


def test_bytes():
    assert forward_case().bytes_moved == 2 * 2 * 24 * 40 * 2 and forward_case(Form.ODD).bytes_moved == 2 * 2 * 24 * 39 * 2
    assert update_case().bytes_moved == 16 * 5 * DIM and update_case(dtype=torch.float32).bytes_moved == 32 * 5 * DIM
    assert update_case(tokens=3).bytes_moved == (6 + 3 + 5) * 2 * 5 * DIM


# The peer.


@pytest.fixture
def called(monkeypatch):
    """What the peer's functions are called with."""
    calls: dict[str, dict] = {}

    def imported(module, name):
        return lambda **kwargs: calls.update({f"{module}.{name}": kwargs}) or torch.zeros(3)

    monkeypatch.setattr(report, "imported", imported)
    return calls


@pytest.mark.parametrize("form", Form)
def test_the_peer_gets_the_same_prompts(called, form):
    assert (forward.dao(forward_case(form)) is None) == (form not in (Form.PLAIN, Form.ODD))
    case = forward_case(form, LAST)
    call = forward.dao(case)
    assert (call is None) == (form is Form.VARLEN)
    if call:
        call(1)
        given = called["causal_conv1d.causal_conv1d_fn"]
        assert all(given[name] is value for name, value in case.arguments(1).items() if name != "out") and "out" not in given
        assert given["x"].stride(1) == 1


def test_the_peer_gets_the_same_steps(called):
    case = update_case()
    update.dao(case)(2)
    given = called["causal_conv1d.causal_conv1d_update"]
    assert given["conv_state"] is case.state and torch.equal(given["conv_state_indices"], case.slots[2]) and "out" not in given
    assert update.dao(update_case(tokens=2)) is None


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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["causal_conv1d", "--shape", "1,2"], "is not three positive numbers"),
        (["causal_conv1d", "--shape", "1,0,2"], "is not three positive numbers"),
        (["causal_conv1d", "--shape", "1,x,2"], "is not three positive numbers"),
        (["causal_conv1d", "--form", "even"], "'even' is not one of"),
        (["causal_conv1d", "--width", "9"], "9 is not in the range"),
        (["causal_conv1d", "--batch", "2"], "No such option"),
        (["causal_conv1d_update", "--layout", "channel_last"], "No such option"),
        (["causal_conv1d_update", "--state-layout", "any"], "'any' is not one of"),
    ],
)
def test_options_that_do_not_apply_are_usage_errors(args, message):
    result = CliRunner().invoke(cli.main, ["bench", *args])
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def options_of(monkeypatch, module, *args):
    seen = {}
    monkeypatch.setattr(module, "run", lambda **options: seen.update(options) or {"rows": [], "failed": []})
    result = CliRunner().invoke(cli.main, ["bench", *args, "--json", "--no-peers", "--rounds", "3"])
    assert result.exit_code == 0, result.output
    assert seen.pop("watch") and (seen.pop("peers"), seen.pop("rounds")) == (False, 3)
    return seen


def test_options_reach_the_benchmark(monkeypatch):
    args = ["causal_conv1d", "--shape", "1,2,3", "--shape", "4,5,6", "--layout", "channel_last", "--form", "odd", "--dtype", "f32"]
    wanted = {"shapes": ((1, 2, 3), (4, 5, 6)), "layouts": (LAST,), "forms": ("odd",), "width": 4, "dtype": DType.F32}
    assert options_of(monkeypatch, forward, *args) == wanted
    args = ["causal_conv1d_update", "--batch", "2", "--tokens", "4", "--state-layout", "channels", "--dim", "64", "--width", "3"]
    wanted = {"batches": (2,), "tokens": (4,), "layouts": ("channels",), "dim": 64, "width": 3, "dtype": DType.BF16, "tree": False}
    assert options_of(monkeypatch, update, *args) == wanted
    assert options_of(monkeypatch, update, "causal_conv1d_update")["dim"] == 12288


def test_the_command_names_every_form_and_layout():
    for op, names in ("causal_conv1d", [f.value for f in Form]), ("causal_conv1d_update", [i.value for i in Innermost]):
        text = CliRunner().invoke(cli.main, ["bench", op, "--help"]).output
        assert f"[{'|'.join(names)}]" in text


# Reports.


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Everything but the device and the clock."""
    monkeypatch.setattr(report, "begin", lambda method="": REPORT | {"rows": [], "failed": []})
    monkeypatch.setattr(report, "usable", lambda peers: {name: call for name, call in peers.items() if call})
    monkeypatch.setattr(runtime, "device_arch", lambda index: Arch.parse("sm_90a"))

    def device_us(contenders, sets, rounds):
        for launch in contenders.values():
            launch(0)
            launch(sets - 1)
        return {name: 2.0 + 2 * (name == "mul") + 6 * (name == "causal_conv1d") for name in contenders}

    monkeypatch.setattr(timing, "device_us", device_us)
    monkeypatch.setattr(timing, "host_us", lambda call: call() is None or 1.0)


REPORT = {"device": "a GPU", "torch": "2", "compiler": "CL-1", "ceilings_tbs": {"in_place": 4.2}}
US = ["causal_conv1d", "mul", "ssmgen", "ssmgen_pdl"]


def test_run_of_prompts(without_a_gpu, called):
    said = []
    found = forward.run([SHAPE], forms=["plain", "varlen"], device="cpu", watch=Watch(said.append))
    rows = found["rows"]
    assert [(r["form"], r["layout"]) for r in rows] == [(f, layout.value) for f in ("plain", "varlen") for layout in ConvLayout]
    assert [sorted(r["us"]) for r in rows] == [US, US, US[1:], US[1:]] and len(said) == 4
    for row in rows:
        assert (row["served_us"], row["mul_ratio"], row["tbs"]) == (2.0, 0.5, row["bytes"] / 2e6) and row["out_error"] < 6e-3
        assert row["spec"].startswith("causal_conv1d:") and row["rule"] and row["compile_seconds"] > 0
    assert rows[0]["peer_ratio"] == {"causal_conv1d": 0.25} and set(rows[0]["host_us"]) == {"ssmgen", "ssmgen_bound", "causal_conv1d"}
    assert said[0] == "channel_first plain (2, 24, 40): 2.00 us, 0.00 TB/s, 0.500 x mul, 0.250 x causal_conv1d"
    lines = forward.table(found).splitlines()
    assert len(lines) == 4 + 4 and lines[2] == "causal_conv1d: width 4, bf16, bias, SiLU; (batch, dim, length)"
    assert " ".join(lines[4].split())[:75] == "channel_first plain (2, 24, 40) 2.00 0.00 2.00 4.00 0.500 8.00 0.25 1.00 1."
    assert lines[3].index("  rule") == lines[4].index(f"  {rows[0]['rule']}")


def test_run_of_steps(without_a_gpu, called):
    found = update.run([1, 9], [1, 2], dim=DIM, device="cpu", watch=SILENT)
    rows = found["rows"]
    assert [(r["layout"], r["tokens"], r["batch"]) for r in rows] == [(i.value, t, b) for i in Innermost for t in (1, 2) for b in (1, 9)]
    assert [sorted(r["us"]) for r in rows] == 2 * [US, US, US[1:], US[1:]]
    assert [bool(r["host_us"]) for r in rows] == 4 * [True, False]
    lines = update.table(found).splitlines()
    assert len(lines) == 4 + 8 and lines[4].split()[:3] == ["window", "1", "1"]
    assert lines[3].index("  rule") == lines[4].index(f"  {rows[0]['rule']}")
    assert len(update.run([1], dim=DIM, peers=False, device="cpu", watch=SILENT)["rows"][0]["us"]) == 3


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
@pytest.mark.parametrize("module", [forward, update])
def test_run_without_a_gpu_says_so(module):
    with pytest.raises(SsmgenError, match="bench needs a CUDA device"):
        module.run()
