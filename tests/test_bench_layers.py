"""The decode layers' benchmark, as far as it needs no GPU: cases on CPU tensors, the byte model, what peers are called with, options."""

from __future__ import annotations

import pytest
import torch
from bench_cases import HEAD
from click.testing import CliRunner

import ssmgen
from ssmgen import cli, runtime
from ssmgen.bench import bench_of, report, timing
from ssmgen.bench import layers as bench
from ssmgen.bench.layer_case import COPIED, Case, copied_bytes
from ssmgen.bench.progress import Watch
from ssmgen.catalog import parse
from ssmgen.errors import SsmgenError
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.family import public_names
from ssmgen.models import find_model
from ssmgen.spec import Arch, DType

pytestmark = pytest.mark.usefixtures("one_compile")

F32, BF16 = torch.float32, torch.bfloat16
BATCH = 3
CASES = {
    "normed": ("mamba2_layer", "nemotron-h-8b", 8),
    "divided": ("mamba2_layer", "mamba2-130m", 2),  # a norm's group is two ranks'
    "gated": ("mamba2_layer", "falcon-h1-tiny-90m", 1),
    "gdn": ("gdn_layer", "qwen3.5-35b-a3b", 8),
    "kda": ("kda_layer", "kimi-linear-48b-a3b", 8),
    "bounded": ("kda_layer", "kimi-k3", 32),
}


@pytest.fixture(autouse=True)
def small_pools(monkeypatch):
    monkeypatch.setattr(bench, "POOL_BYTES", 1)
    torch.manual_seed(0)


def case_of(name: str, dtype: torch.dtype = BF16, batch: int = BATCH) -> Case:
    op, model, tp = CASES[name]
    model = find_model(model).divided(tp)
    rows, elements, _ = model.shape
    state_bytes = model.nheads * rows * elements * dtype.itemsize
    slots = bench.pool_slots(copied_bytes(model, state_bytes), state_bytes, batch)
    return bench.case_of(op, model, report.normal_pool(slots, (model.nheads, rows, elements), dtype, "cpu"), batch)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_cases_are_legal_and_pass_the_gate(name, dtype):
    case = case_of(name, dtype)
    before = case.state.clone(), case.conv_state.clone()
    state_error, out_error = case.gate()
    assert state_error < report.GATE[dtype] and out_error < report.GATE[BF16] and case.sets >= 4
    assert torch.equal(case.state, before[0]) and torch.equal(case.conv_state, before[1]), "timed calls begin with the same"
    problem = ssmgen.explain(case.function, **case.arguments(case.sets - 1), arch="sm_90a").problem
    (expected,) = [p for p in case.model.layers((problem.state,), (problem.index,)) if p == problem]
    assert (expected.norm.weight is None) == (name in ("divided", "gated"))
    assert (expected.conv.layout.value, expected.conv.len) == ("runs", 3)
    assert [step.function.__name__ for step in case.chain(0)] == [
        "causal_conv1d_update",
        {"gdn_layer": "gated_delta_rule", "kda_layer": "kda"}.get(case.op, "selective_state_update"),
        *(["gated_rms_norm"] if expected.norm.weight else []),
    ]


@pytest.mark.parametrize("intermediates", [False, True], ids=["final", "kept"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", ["normed", "gated", "gdn", "kda", "bounded"])
def test_cases_of_several_tokens_are_legal_and_pass_the_gate(name, dtype, intermediates):
    one = case_of(name, dtype)
    case = bench.case_of(one.op, one.model, one.state, BATCH, 3, intermediates)
    before = case.state.clone(), case.conv_state.clone()
    state_error, out_error = case.gate()
    assert state_error < report.GATE[dtype] + 3e-3 and out_error < 2 * report.GATE[BF16]
    assert torch.equal(case.state, before[0]) and torch.equal(case.conv_state, before[1]), "timed calls begin with the same"
    problem = ssmgen.explain(case.function, **case.arguments(case.sets - 1), arch="sm_90a").problem
    how = {"intermediates": intermediates, "update_state": not intermediates}
    assert problem in case.model.layers((problem.state,), (problem.index,), tokens=3, **how)
    assert case.bytes_moved == (4 if intermediates else 2) * BATCH * case.piece_bytes


@pytest.mark.parametrize(("name", "dtype"), [("normed", BF16), ("gdn", F32), ("bounded", BF16)], ids=["normed", "gdn", "bounded"])
def test_cases_of_a_slot_per_token_are_legal_and_pass_the_gate(name, dtype):
    """Each token's state goes to a slot of its own; nobody else's slot is touched."""
    one, T = case_of(name, dtype, 3 * BATCH), 3
    case = bench.case_of(one.op, one.model, one.state, BATCH, T, by_slot=True)
    before = case.state.clone(), case.conv_state.clone()
    state_error, out_error = case.gate()
    assert state_error < report.GATE[dtype] + 3e-3 and out_error < 2 * report.GATE[BF16] and case.sets >= 4
    assert torch.equal(case.state, before[0]) and torch.equal(case.conv_state, before[1]), "timed calls begin with the same"
    assert case.slots.shape == (case.sets, BATCH, T) and case.slots.unique().numel() == case.slots.numel()
    call = case.arguments(case.sets - 1)
    problem = ssmgen.explain(case.function, **call, arch="sm_90a").problem
    assert problem in case.model.layers((problem.state,), (problem.index,), tokens=T)
    assert (problem.update.value, problem.conv.len) == ("each", 5)
    window = case.model.layer_channels * 5 * 2
    assert case.bytes_moved == BATCH * (4 * case.state[0].nbytes + 2 * window)
    case.function(**call)
    used = call["state_indices"].flatten().long()
    others = [slot for slot in range(len(case.state)) if slot not in used]
    assert torch.equal(case.state[others], before[0][others])
    assert not any(torch.equal(case.state[slot], before[0][slot]) for slot in used)


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_cases_of_keys_first_are_legal_and_pass_the_gate(name):
    one = case_of(name)
    case = bench.case_of(one.op, one.model, one.state, BATCH, layout="kv")
    case.gate()
    assert ssmgen.explain(case.function, **case.arguments(0), arch="sm_90a").problem.interleaved
    assert case.chain(0)[1].arguments["state_layout"] == "kv" and bench.peers_of(case) == {}


@pytest.mark.parametrize("wrong", ["intermediate_states", "intermediate_conv_window", "out"])
def test_the_gate_stops_what_is_wrong_with_several_tokens(wrong, monkeypatch):
    def function(**call):
        ssmgen.mamba2_layer(**call)
        call[wrong].mul_(1.1)

    function.build = ssmgen.mamba2_layer.build
    monkeypatch.setattr(Case, "function", property(lambda _: function))
    one = case_of("normed")
    with pytest.raises(SsmgenError, match=r"the chain has other bits; not timed"):
        bench.case_of(one.op, one.model, one.state, BATCH, 3, True).gate()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("out", r"out error .*e-0[12]; not timed|out error .*e-0[12], the chain has other bits"),
        ("state", r"state error .*e-0[12].*the chain has other bits"),
        ("conv_state", "windows or arrivals are wrong"),
        ("arrivals", "windows or arrivals are wrong"),
    ],
)
@pytest.mark.parametrize("name", ["normed", "gdn", "kda"])
def test_the_gate_stops_what_is_wrong(name, wrong, words, monkeypatch):
    def function(**call):
        getattr(ssmgen, CASES[name][0])(**call)
        if wrong == "arrivals":
            call[wrong].add_(1)
        elif wrong == "out":
            call[wrong].mul_(1.1)
        else:
            slots = call["state_indices"].long()
            call[wrong][slots] = call[wrong][slots] * 1.1

    function.build = getattr(ssmgen, CASES[name][0]).build
    monkeypatch.setattr(Case, "function", property(lambda _: function))
    with pytest.raises(SsmgenError, match=words):
        case_of(name).gate()


@pytest.mark.parametrize("name", CASES)
def test_a_chain_of_other_bits_is_said(name, monkeypatch):
    chain = Case.chain

    def another(case, i):
        (function, call), *others = chain(case, i)
        return [(function, call | {"bias": torch.ones(call["x"].shape[1], dtype=BF16)}), *others]

    monkeypatch.setattr(Case, "chain", another)
    with pytest.raises(SsmgenError, match="the chain has other bits; not timed"):
        case_of(name).gate()


def test_bytes(monkeypatch):
    case = case_of("normed", F32)
    state, window = 16 * 64 * 128 * 4, (16 * 64 + 2 * 128) * 3 * 2
    assert case.piece_bytes == state + window and case.bytes_moved == 2 * BATCH * (state + window)
    seen = {}
    monkeypatch.setattr(report, "slot_copies", lambda pieces, slots, pdls: seen.update(pieces=pieces, slots=slots) or {})
    case.copies((True, False))
    assert 0 <= seen["pieces"][0].nbytes - case.piece_bytes < COPIED and seen["pieces"][0].nbytes % COPIED == 0
    assert (
        not SlotCopySpec(slot_bytes=seen["pieces"][0].nbytes).violations(Arch.parse("sm_90a"))
        and seen["pieces"].data_ptr() == case.state.data_ptr()
    )
    assert seen["slots"].shape == (case.sets, BATCH) and seen["slots"].flatten().unique().numel() == case.sets * BATCH
    assert seen["slots"].max() < len(seen["pieces"])


@pytest.fixture
def packages(monkeypatch):
    """Functions that do what the peers' do, and what they were called with; `factor` makes their results wrong."""
    state = {"calls": {}, "factor": 1.0}

    def dao(x, conv_state, weight, bias, activation, conv_state_indices):
        assert activation == "silu"
        return ssmgen.causal_conv1d_update(x, conv_state, weight, bias, activation, conv_state_indices=conv_state_indices)

    def update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, out=None):
        given = {"dt_softplus": dt_softplus, "state_indices": state_batch_indices, "out": out}
        return ssmgen.selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, **given)

    def flashinfer(state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices, out, z=None):
        return update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, out).mul_(state_of["factor"])

    def flashinfer_gdn(A_log, a, dt_bias, q, k, v, b, initial_state_source, initial_state_indices, output, use_qk_l2norm_in_kernel):
        assert use_qk_l2norm_in_kernel and dt_bias.dtype == F32
        options = {"use_qk_l2norm": True, "beta_sigmoid": True, "state_indices": initial_state_indices, "out": output}
        return ssmgen.gated_delta_rule(initial_state_source, q, k, v, a, b, A_log, dt_bias, **options).mul_(state_of["factor"])

    def rmsnorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate):
        return ssmgen.gated_rms_norm(x, z, weight, eps, norm_before_gate=norm_before_gate, group_size=group_size) * state_of["factor"]

    def fused_recurrent(q, k, v, g, beta, A_log, dt_bias, initial_state, output_final_state, **options):
        assert options == {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        state = initial_state.transpose(2, 3).contiguous()
        return ssmgen.gated_delta_rule(state, q, k, v, g, beta, A_log, dt_bias, use_qk_l2norm=True, beta_sigmoid=True), state

    def rms_norm_gated(x, g, weight, bias, activation, eps):
        return ssmgen.gated_rms_norm(x, g, weight, eps, norm_before_gate=True, activation=activation) * state_of["factor"]

    functions = {
        "causal_conv1d.causal_conv1d_update": dao,
        "flashinfer.mamba.selective_state_update": flashinfer,
        "flashinfer.gdn_kernels.gdn_decode_bf16_state.gated_delta_rule": flashinfer_gdn,
        "mamba_ssm.ops.triton.selective_state_update.selective_state_update": update,
        "mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn": rmsnorm_fn,
        "fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule": fused_recurrent,
        "fla.modules.fused_norm_gate.rms_norm_gated": rms_norm_gated,
    }
    state_of = state

    def imported(module, name):
        path = f"{module}.{name}"

        def called(*args, **kwargs):
            state["calls"][path] = args, kwargs
            return functions[path](*args, **kwargs)

        return called if path not in state.get("missing", ()) else None

    monkeypatch.setattr(report, "imported", imported)
    monkeypatch.setattr(report, "usable", dict)
    return state


PEERS = {"normed": {"flashinfer", "mamba_ssm"}, "divided": {"flashinfer", "mamba_ssm"}, "gated": {"flashinfer", "mamba_ssm"}}
PEERS |= {"gdn": {"flashinfer", "fla"}, "kda": set(), "bounded": set()}


@pytest.mark.parametrize("own_convolution", [False, True], ids=["dao", "ours"])
@pytest.mark.parametrize("name", [name for name in CASES if PEERS[name]])
def test_the_peers_are_called_right(packages, name, own_convolution):
    """Their results pass the check, whose states are left as they were."""
    packages["missing"] = ["causal_conv1d.causal_conv1d_update"] if own_convolution else []
    case = case_of(name)
    before = case.state.clone(), case.conv_state.clone()
    peers = bench.peers_of(case)
    assert peers.keys() == PEERS[name] and torch.equal(case.state, before[0]) and torch.equal(case.conv_state, before[1])
    assert ("causal_conv1d.causal_conv1d_update" in packages["calls"]) != own_convolution
    for call in peers.values():
        assert call(1) is None
    assert not torch.equal(case.conv_state, before[1])


@pytest.mark.parametrize("name", ["normed", "gdn"])
def test_a_wrong_peer_is_left_out(packages, name):
    packages["factor"] = -1.0
    with pytest.warns(UserWarning, match="is not timed: checked, it raised SsmgenError: output error"):
        assert bench.peers_of(case_of(name)) == {}


@pytest.mark.parametrize("name", ["kda", "bounded"])
def test_kimi_delta_attention_has_no_peers(packages, name):
    assert bench.peers_of(case_of(name)) == {} and not packages["calls"]


def test_peers_that_do_not_serve_a_state(packages):
    assert bench.peers_of(case_of("gdn", F32)).keys() == {"fla"}, "FlashInfer has a bf16 state"


# Options and reports.


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("mamba2_layer", ["--model", "qwen3.5-35b-a3b"], "qwen3.5-35b-a3b: without layers that mamba2_layer is for"),
        ("gdn_layer", ["--state", "f8"], "'f8' is not one of"),
        ("gdn_layer", ["--batch", "0"], "0 is not in the range"),
        ("mamba2_layer", ["--tokens", "9"], "a layer takes up to 8 tokens of a sequence, not 9"),
        ("mamba2_layer", ["--intermediates"], "--intermediates needs --tokens of more than 1"),
        ("gdn_layer", ["--slot-per-token"], "--slot-per-token needs --tokens of more than 1"),
        ("kda_layer", ["--slot-per-token", "--intermediates", "--tokens", "2"], "--slot-per-token keeps every token's state in the pool"),
        ("mamba2_layer", ["--state-layout", "kv"], "No such option"),
    ],
)
def test_options_that_do_not_apply_are_usage_errors(op, args, message):
    result = CliRunner().invoke(cli.main, ["bench", op, *args])
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_options_reach_the_benchmark(monkeypatch):
    seen = {}
    monkeypatch.setattr(bench_of("mamba2_layer"), "run", lambda **options: seen.update(options) or {"rows": [], "failed": []})
    args = ["--model", "nemotron-h-8b", "--state", "f16", "--batch", "7", "--tp", "2", "--json", "--no-peers", "--tokens", "4"]
    result = CliRunner().invoke(cli.main, ["bench", "mamba2_layer", *args])
    assert result.exit_code == 0, result.output
    wanted = {"op": "mamba2_layer", "names": ("nemotron-h-8b",), "states": (DType.F16,), "batches": (7,), "tp": 2, "tokens": (4,)}
    assert seen.pop("watch") and seen == wanted | {"peers": False, "rounds": 7, "intermediates": None, "by_slot": False}


@pytest.mark.parametrize("name", ["normed", "gdn", "kda"])
def test_run(packages, name, monkeypatch):
    op, model, tp = CASES[name]
    monkeypatch.setattr(report, "begin", lambda method="": HEAD | {"rows": [], "failed": []})
    monkeypatch.setattr(report, "slot_copies", lambda state, slots, pdls: {"copy_pdl": lambda i: slots[i], "copy": lambda i: slots[i]})
    monkeypatch.setattr(runtime, "device_arch", lambda index: Arch.parse("sm_90a"))
    monkeypatch.setattr(timing, "host_us", lambda call: call() is not call and 1.0)

    def device_us(contenders, sets, rounds):
        for launch in contenders.values():
            launch(sets - 1)
        return {n: 2.0 if n.startswith("ssmgen") else 1.0 if n.startswith("copy") else 8.0 for n in contenders}

    monkeypatch.setattr(timing, "device_us", device_us)
    said = []
    options = {"states": [DType.BF16], "batches": [1, 9], "tp": tp, "device": "cpu"}
    found = bench.run(op, [model], **options, watch=Watch(said.append))
    rows = found["rows"]
    assert len(said) == len(rows) == 2 and not found["failed"]
    for row in rows:
        assert (row["served_us"], row["copy_ratio"]) == (2.0, 2.0) and row["peer_ratio"].keys() == PEERS[name] | {"chain"}
        assert set(row["peer_ratio"].values()) == {0.25} and row["host_us"].keys() == (
            {"ssmgen", "ssmgen_bound", "chain"} | PEERS[name] if row["batch"] == 1 else set()
        )
        assert row["specs"][0].startswith(f"{public_names()[op][0].name}:") and row["compile_seconds"] > 0
    lines = bench.table(found).splitlines()
    assert len(lines) == 4 + len(rows) and lines[4].startswith(model)
    assert lines[3].index("  rule") == lines[4].index(f"  {rows[0]['rule']}")


def test_run_of_several_tokens(monkeypatch):
    monkeypatch.setattr(report, "begin", lambda method="": HEAD | {"rows": [], "failed": []})
    monkeypatch.setattr(report, "slot_copies", lambda state, slots, pdls: {"copy": lambda i: slots[i]})
    monkeypatch.setattr(runtime, "device_arch", lambda index: Arch.parse("sm_90a"))
    monkeypatch.setattr(timing, "host_us", lambda call: call() is not call and 1.0)

    def device_us(contenders, sets, rounds):
        for launch in contenders.values():
            launch(sets - 1)
        return dict.fromkeys(contenders, 2.0)

    monkeypatch.setattr(timing, "device_us", device_us)
    options = {"states": [DType.BF16], "batches": [1], "tp": 8, "device": "cpu", "tokens": [1, 2], "watch": Watch(lambda line: None)}
    found = bench.run("mamba2_layer", ["nemotron-h-8b"], **options)
    assert not found["failed"] and [(row["tokens"], row["intermediates"]) for row in found["rows"]] == [(1, False), (2, True)]
    assert found["rows"][1]["copy_ratio"] is None and found["rows"][1]["specs"][0].startswith("mamba2_layer:")
    final = bench.run("mamba2_layer", ["nemotron-h-8b"], **options | {"tokens": [2]}, intermediates=False)["rows"][0]
    assert final["copy_ratio"] == 1.0 and parse(final["specs"][0]).update.value == "final"
    monkeypatch.setattr(bench, "_compile_seconds", lambda text, arch, spec: 0.1)
    by_slot = bench.run("mamba2_layer", ["nemotron-h-8b"], **options | {"tokens": [2]}, by_slot=True)
    assert not by_slot["failed"] and parse(by_slot["rows"][0]["specs"][0]).update.value == "each"
    assert "  2s" in bench.table(by_slot) and by_slot["rows"][0]["copy_ratio"] is None
    turned = bench.run("gdn_layer", ["qwen3.5-35b-a3b"], **options | {"tokens": [1]}, layouts=["vk", "kv"], peers=False)
    assert not turned["failed"] and [bench.point(turned, row).case for row in turned["rows"]] == [
        f"qwen3.5-35b-a3b, 4 heads, bf16{layout} state" for layout in ("", " kv")
    ]
    assert "  2+" in bench.table(found) and bench.point(found, found["rows"][1]).case.endswith("bf16 state, 2+ tokens")


def test_models_without_such_layers(monkeypatch):
    monkeypatch.setattr(report, "begin", lambda method="": HEAD | {"rows": [], "failed": []})
    with pytest.raises(SsmgenError, match="mamba-130m, kimi-k3: without layers that gdn_layer is for"):
        bench.run("gdn_layer", ["mamba-130m", "kimi-k3"], device="cpu")


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
@pytest.mark.parametrize("op", ("mamba2_layer", "gdn_layer", "kda_layer"))
def test_run_without_a_gpu_says_so(op):
    with pytest.raises(SsmgenError, match="bench needs a CUDA device"):
        bench.run(op)
