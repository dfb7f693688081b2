"""The decode layers' benchmark, the parts that run without a GPU: cases on CPU tensors, the byte model, the peers' arguments, options."""

from __future__ import annotations

import pytest
import torch
from bench_cases import BF16, F32, HEAD, SILENT, broken, on_the_cpu, small_case

import ssmgen
from ssmgen.bench import bench_of, engine, report, rows
from ssmgen.bench.case import GATE
from ssmgen.bench.layer_case import COPIED, Layer
from ssmgen.bench.progress import Watch
from ssmgen.errors import SsmgenError
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.select.catalog import parse
from ssmgen.select.models import find_model
from ssmgen.spec.family import public_names
from ssmgen.spec.kernel import Arch, DType

pytestmark = pytest.mark.usefixtures("one_compile")

BATCH = 3
CASES = {
    "normed": ("mamba2_layer", "nemotron-h-8b", 8),
    "divided": ("mamba2_layer", "mamba2-130m", 2),  # a norm's group is two ranks'
    "gated": ("mamba2_layer", "falcon-h1-tiny-90m", 1),
    "gdn": ("gdn_layer", "qwen3.5-35b-a3b", 8),
    "kda": ("kda_layer", "kimi-linear-48b-a3b", 8),
    "bounded": ("kda_layer", "kimi-k3", 32),
}


def case_of(name: str, dtype: torch.dtype = BF16, batch: int = BATCH, **how) -> Layer:
    op, model, tp = CASES[name]
    state = DType.F32 if dtype is F32 else DType.BF16
    return small_case(op, 1, model=find_model(model).divided(tp), state=state, batch=batch, **how)


def peers_of(case: Layer) -> dict:
    return engine.peers_of(case, bench_of(case.op).peers)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_cases_are_legal_and_pass_the_gate(name, dtype):
    case = case_of(name, dtype)
    before = case.state.clone(), case.conv_state.clone()
    errors = case.gate()
    assert errors["state"] < GATE[dtype] and errors["out"] < GATE[BF16] and case.sets >= 4
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
    case = case_of(name, dtype, tokens=3, intermediates=intermediates)
    before = case.state.clone(), case.conv_state.clone()
    errors = case.gate()
    assert errors.pop("out") < 2 * GATE[BF16] and max(errors.values()) < GATE[dtype] + 3e-3
    assert torch.equal(case.state, before[0]) and torch.equal(case.conv_state, before[1]), "timed calls begin with the same"
    problem = ssmgen.explain(case.function, **case.arguments(case.sets - 1), arch="sm_90a").problem
    how = {"intermediates": intermediates, "update_state": not intermediates}
    assert problem in case.model.layers((problem.state,), (problem.index,), tokens=3, **how)
    assert case.bytes == (4 if intermediates else 2) * BATCH * case.piece_bytes


@pytest.mark.parametrize(("name", "dtype"), [("normed", BF16), ("gdn", F32), ("bounded", BF16)], ids=["normed", "gdn", "bounded"])
def test_cases_of_a_slot_per_token_are_legal_and_pass_the_gate(name, dtype):
    """Each token's state goes to a separate slot; no other slot is changed."""
    T = 3
    case = case_of(name, dtype, tokens=T, by_slot=True)
    before = case.state.clone(), case.conv_state.clone()
    errors = case.gate()
    assert errors["state"] < GATE[dtype] + 3e-3 and errors["out"] < 2 * GATE[BF16] and case.sets >= 4
    assert torch.equal(case.state, before[0]) and torch.equal(case.conv_state, before[1]), "timed calls begin with the same"
    assert case.slots.shape == (case.sets, BATCH, T) and case.slots.unique().numel() == case.slots.numel()
    call = case.arguments(case.sets - 1)
    problem = ssmgen.explain(case.function, **call, arch="sm_90a").problem
    assert problem in case.model.layers((problem.state,), (problem.index,), tokens=T)
    assert (problem.update.value, problem.conv.len) == ("each", 5)
    window = case.model.layer_channels * 5 * 2
    assert case.bytes == BATCH * (4 * case.state[0].nbytes + 2 * window)
    case.function(**call)
    used = call["state_indices"].flatten().long()
    others = [slot for slot in range(len(case.state)) if slot not in used]
    assert torch.equal(case.state[others], before[0][others])
    assert not any(torch.equal(case.state[slot], before[0][slot]) for slot in used)


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_cases_of_keys_first_are_legal_and_pass_the_gate(name):
    case = case_of(name, layout="kv")
    case.gate()
    assert ssmgen.explain(case.function, **case.arguments(0), arch="sm_90a").problem.interleaved
    assert case.chain(0)[1].arguments["state_layout"] == "kv" and peers_of(case) == {}


@pytest.mark.parametrize("wrong", ["intermediate_states", "intermediate_conv_window", "out"])
def test_the_gate_stops_what_is_wrong_with_several_tokens(wrong):
    case = case_of("normed", tokens=3)
    broken(case, lambda call: call[wrong].mul_(1.1))
    with pytest.raises(SsmgenError, match=rf"{wrong} error [1-9].*the chain has other bits; not timed"):
        case.gate()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("out", r"out error .*e-0[12].*, the chain has other bits"),
        ("state", r"state error .*e-0[12].*the chain has other bits"),
        ("conv_state", r"conv_state error .*e-0[12].*the chain has other bits"),
        ("arrivals", r"arrivals error [1-9].*; not timed"),
    ],
)
@pytest.mark.parametrize("name", ["normed", "gdn", "kda"])
def test_the_gate_stops_what_is_wrong(name, wrong, words):
    case = case_of(name)

    def change(call):
        if wrong == "arrivals":
            call[wrong].add_(1)
        elif wrong == "out":
            call[wrong].mul_(1.1)
        else:
            slots = call["state_indices"].long()
            call[wrong][slots] = call[wrong][slots] * 1.1

    broken(case, change)
    with pytest.raises(SsmgenError, match=words):
        case.gate()


@pytest.mark.parametrize("name", CASES)
def test_a_chain_of_other_bits_is_said(name, monkeypatch):
    chain = Layer.chain

    def another(case, i):
        (function, call), *others = chain(case, i)
        return [(function, call | {"bias": torch.ones(call["x"].shape[1], dtype=BF16)}), *others]

    monkeypatch.setattr(Layer, "chain", another)
    with pytest.raises(SsmgenError, match="the chain has other bits; not timed"):
        case_of(name).gate()


def test_bytes():
    case = case_of("normed", F32)
    state, window = 16 * 64 * 128 * 4, (16 * 64 + 2 * 128) * 3 * 2
    assert case.piece_bytes == state + window and case.bytes == 2 * BATCH * (state + window)
    pieces, slots = case.copied
    assert 0 <= pieces[0].nbytes - case.piece_bytes < COPIED and pieces[0].nbytes % COPIED == 0
    assert not SlotCopySpec(slot_bytes=pieces[0].nbytes).violations(Arch.parse("sm_90a")) and pieces.data_ptr() == case.state.data_ptr()
    assert slots.shape == (case.sets, BATCH) and slots.flatten().unique().numel() == case.sets * BATCH and slots.max() < len(pieces)


@pytest.fixture
def packages(monkeypatch):
    """Functions that replace the peers', and their recorded arguments; `factor` makes their results wrong."""
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
    monkeypatch.setattr(report, "usable", lambda peers: {name: call for name, call in peers.items() if call})
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
    peers = peers_of(case)
    assert peers.keys() == PEERS[name] and torch.equal(case.state, before[0]) and torch.equal(case.conv_state, before[1])
    assert ("causal_conv1d.causal_conv1d_update" in packages["calls"]) != own_convolution
    for call in peers.values():
        call(1)
    assert not torch.equal(case.conv_state, before[1])


@pytest.mark.parametrize("name", ["normed", "gdn"])
def test_a_wrong_peer_is_left_out(packages, name):
    packages["factor"] = -1.0
    with pytest.warns(UserWarning, match="is not timed: checked, it raised SsmgenError: out error"):
        assert peers_of(case_of(name)) == {}


@pytest.mark.parametrize("name", ["kda", "bounded"])
def test_kimi_delta_attention_has_no_peers(packages, name):
    assert peers_of(case_of(name)) == {} and not packages["calls"]


def test_peers_that_do_not_serve_a_state(packages):
    assert peers_of(case_of("gdn", F32)).keys() == {"fla"}, "FlashInfer has a bf16 state"


# Reports.


def run(op: str, model: str, **how) -> dict:
    found = bench_of(op).run(**{"names": [model], "states": [DType.BF16], "batches": [1], "device": "cpu", "watch": SILENT} | how)
    assert not found["failed"]
    return found


@pytest.mark.parametrize("name", ["normed", "gdn", "kda"])
def test_run(packages, name, monkeypatch):
    op, model, tp = CASES[name]
    on_the_cpu(monkeypatch)
    said = []
    found = run(op, model, batches=[1, 9], tp=tp, watch=Watch(said.append))["rows"]
    assert len(said) == len(found) == 2
    for row in found:
        assert (row["served_us"], row["copy_ratio"]) == (2.0, 2 / 3) and row["peer_ratio"].keys() == PEERS[name] | {"chain"}
        assert set(row["peer_ratio"].values()) == {0.25} and row["host_us"].keys() == (
            {"ssmgen", "ssmgen_bound", "chain"} | PEERS[name] if row["batch"] == 1 else set()
        )
        assert row["specs"][0].startswith(f"{public_names()[op][0].name}:") and row["compile_seconds"] > 0


def test_run_of_several_tokens(monkeypatch):
    on_the_cpu(monkeypatch)
    ours = {"op": "mamba2_layer", "model": "nemotron-h-8b", "tp": 8}
    found = run(**ours, tokens=[1, 2])
    assert [(row["tokens"], row["intermediates"]) for row in found["rows"]] == [(1, False), (2, True)]
    assert found["rows"][1]["copy_ratio"] is None and found["rows"][1]["specs"][0].startswith("mamba2_layer:")
    final = run(**ours, tokens=[2], intermediates=False)["rows"][0]
    assert final["copy_ratio"] == 2 / 3 and parse(final["specs"][0]).update.value == "final"
    by_slot = run(**ours, tokens=[2], by_slot=True)
    assert parse(by_slot["rows"][0]["specs"][0]).update.value == "each" and by_slot["rows"][0]["copy_ratio"] is None
    turned = run("gdn_layer", "qwen3.5-35b-a3b", tp=8, layouts=["vk", "kv"], peers=False)
    assert [row.case for row in rows.rows_of(turned)] == [f"qwen3.5-35b-a3b, 4 heads, bf16{layout} state" for layout in ("", " kv")]
    cases = [rows.rows_of(report)[-1].case for report in (found, by_slot)]
    assert [case.partition("bf16 state, ")[2] for case in cases] == ["2+ tokens", "2s tokens"]


def test_models_without_such_layers(monkeypatch):
    monkeypatch.setattr(report, "begin", lambda method="": HEAD | {"rows": [], "failed": []})
    with pytest.raises(SsmgenError, match="mamba-130m has no layer that gdn_layer computes"):
        bench_of("gdn_layer").run(names=["mamba-130m", "kimi-k3"], device="cpu")
