"""16-bit states of the engines with noise: each decode step with SSMGEN_ENGINE_NOISE, the engines' own option, and their refusals."""

from __future__ import annotations

import logging
from dataclasses import replace as changed
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_conv import randn

from ssmgen.compat import sglang, vllm
from ssmgen.compat.shared import noise
from ssmgen.engine.stochastic_reference import stored
from ssmgen.errors import CaptureError, ConfigError, UnsupportedError

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
B, H, K, V, SLOTS, SEED, ROUNDS = 2, 2, 32, 16, 6, 12345, 7
SLOT = torch.tensor([4, 2], dtype=I32)
STARTS = torch.tensor([0, 1, 2], dtype=I32)
ROWS = {"q": randn(1, B, H, K), "k": randn(1, B, H, K, seed=1) / K, "v": randn(1, B, H, V, seed=2)}
GATE = {"a": randn(1, B, H), "b": randn(1, B, H, seed=3), "A_log": randn(H).abs(), "dt_bias": randn(H, seed=4)}
BY_KEY = {"raw_g": randn(1, B, H, K), "raw_beta": randn(1, B, H, seed=3), "A_log": randn(H).abs(), "dt_bias": randn(H * K, seed=4)}
MIXED = torch.cat([t[0].flatten(1) for t in ROWS.values()], 1)
LOGS = ROWS | {"g": -randn(1, B, H).abs() / 9, "beta": randn(1, B, H, seed=5).sigmoid()}
LOGS_BY_KEY = LOGS | {"g": -randn(1, B, H, K).abs() / 9}
PACKED = {"cu_seqlens": STARTS, "ssm_state_indices": SLOT}
SQUARE = {"x": randn(B, 3 * H * K), "weight": randn(3, 4, H * K) / 4, "bias": None, "raw_g": randn(1, B, H, K)}
SSU = {"x": randn(B, H, V), "dt": randn(B, H), "A": -randn(H).abs(), "B": randn(B, 1, K), "C": randn(B, 1, K, seed=1), "D": randn(H)}
SSU |= {"dt_bias": randn(H), "dt_softplus": True, "state_batch_indices": SLOT}


def kda_layer_of_sglang() -> dict[str, Any]:
    weights = {f"w_{n}_t": randn(4, H * K, seed=i) / 4 for i, n in enumerate("qkv")}
    gates = {"a": randn(B, H * K), "b": randn(B, H), "A_log": randn(H).abs(), "dt_bias": randn(H * K)}
    norm = {"onorm_g": randn(B, H * K), "onorm_weight": randn(K), "onorm_eps": 1e-5, "scale": 1.0, "lower_bound": -5.0}
    return weights | gates | norm | {"mixed_qkv": randn(B, 3 * H * K), "cache_indices": SLOT, "conv_bias": torch.zeros(3 * H * K)}


# (function, arguments without the state, name of the state, names of further written operands with their shapes)
CALLS: dict[str, tuple[Any, dict[str, Any], str, dict[str, tuple[int, ...]]]] = {
    "vllm ssu": (vllm.selective_state_update, SSU, "state", {"out": (B, H, V)}),
    "vllm gdn packed": (
        vllm.fused_recurrent_gated_delta_rule_packed_decode,
        {n: t[0] if n in "ab" else t for n, t in GATE.items()} | {"mixed_qkv": MIXED, "scale": 1.0, "ssm_state_indices": SLOT},
        "initial_state", {"out": (B, 1, H, V)},
    ),
    "vllm gdn": (vllm.fused_recurrent_gated_delta_rule, LOGS | PACKED, "initial_state", {}),
    "vllm gdn logits": (vllm.fused_sigmoid_gating_delta_rule_update, GATE | ROWS | PACKED, "initial_state", {}),
    "vllm kda logits": (
        vllm.fused_sigmoid_gating_delta_rule_update,
        {"a": BY_KEY["raw_g"], "b": GATE["b"], "A_log": GATE["A_log"], "dt_bias": BY_KEY["dt_bias"], "is_kda": True} | ROWS | PACKED,
        "initial_state", {},
    ),
    "vllm gdn drafts": (
        vllm.fused_gdn_decode_post_conv_mtp,
        {n: t[0] if n in "ab" else t for n, t in GATE.items()} | {
            "mixed_qkv": MIXED, "state_indices": SLOT[:, None], "cu_seqlens": STARTS, "num_accepted_tokens": torch.ones(B, dtype=I32),
            "output_gate": randn(B, H, V), "norm_weight": randn(V),
        },
        "state", {},
    ),
    "vllm kda": (vllm.fused_recurrent_kda, LOGS_BY_KEY | PACKED, "initial_state", {}),
    "vllm kda fwd": (vllm.fused_recurrent_kda_fwd, LOGS_BY_KEY | PACKED | {"scale": 1.0}, "initial_state", {}),
    "vllm kda fused gate": (
        vllm.fused_recurrent_kda_with_fused_gate, ROWS | BY_KEY | PACKED | {"lower_bound": None}, "initial_state", {}
    ),
    "vllm kda safe gate": (vllm.fused_recurrent_kda_with_safe_gate, LOGS_BY_KEY | PACKED, "initial_state", {}),
    "vllm kda packed": (
        vllm.fused_recurrent_kda_packed_decode, BY_KEY | {"mixed_qkv": MIXED, "lower_bound": None, "state_indices": SLOT},
        "initial_state", {},
    ),
    "vllm kda layer": (
        vllm.fused_kda_decode,
        SQUARE | {n: BY_KEY[n] for n in ("raw_beta", "A_log")} | {"dt_bias": BY_KEY["dt_bias"], "state_indices": SLOT, "lower_bound": -5.0},
        "state", {"conv_state": (SLOTS, 3 * H * K, 3)},
    ),
    "sglang ssu": (sglang.selective_state_update, SSU, "state", {"out": (B, H, V)}),
    "sglang gdn packed": (
        sglang.fused_recurrent_gated_delta_rule_packed_decode,
        {n: t[0] if n in "ab" else t for n, t in GATE.items()} | {"mixed_qkv": MIXED, "scale": 1.0, "ssm_state_indices": SLOT},
        "initial_state", {"out": (B, 1, H, V)},
    ),
    "sglang gdn logits": (
        sglang.fused_sigmoid_gating_delta_rule_update,
        GATE | ROWS | {"softplus_beta": 1.0, "softplus_threshold": 20.0, "initial_state_indices": SLOT, "cu_seqlens": STARTS},
        "initial_state_source", {},
    ),
    "sglang kda packed": (
        sglang.fused_recurrent_kda_packed_decode,
        {"a": BY_KEY["raw_g"][0].flatten(1), "b": GATE["b"][0], "A_log": GATE["A_log"], "dt_bias": BY_KEY["dt_bias"], "scale": 1.0}
        | {"mixed_qkv": MIXED, "ssm_state_indices": SLOT},
        "initial_state", {"out": (B, 1, H, V)},
    ),
    "sglang gdn update": (
        sglang.fused_recurrent_gated_delta_rule_update, LOGS | {"initial_state_indices": SLOT, "cu_seqlens": STARTS},
        "initial_state_source", {},
    ),
    "sglang kda layer": (sglang.kda_fused_decode, kda_layer_of_sglang(), "ssm_states", {"conv_states": (SLOTS, 3, 3 * H * K)}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("SSMGEN_ENGINE_NOISE", raising=False)
    noise.rounds.cache_clear()
    yield
    noise.rounds.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """Noise is asked for, and every new seed is SEED."""
    monkeypatch.setenv("SSMGEN_ENGINE_NOISE", str(ROUNDS))
    monkeypatch.setattr(noise.torch, "randint", lambda *_, **__: torch.tensor([SEED]))


def after(name: str, dtype: torch.dtype, **more: Any) -> Tensor:
    """The pool after the call."""
    function, given, state_name, written = CALLS[name]
    rows = K if "layer" in name else V
    state = randn(SLOTS, H, rows, K, seed=9).to(BF16).to(dtype)
    buffers = {n: torch.zeros(shape) if "conv" in n else torch.empty(shape) for n, shape in written.items()}
    function(**given | buffers | {state_name: state} | more)
    return state


@pytest.mark.parametrize("name", CALLS)
def test_decode_steps_round_with_noise_if_asked(name, asked):
    exact, state = after(name, F32), after(name, BF16)
    before = randn(*state.shape, seed=9).to(BF16)
    for slot in SLOT.tolist():
        assert torch.equal(state[slot], stored(exact[slot], BF16, SEED, ROUNDS, slot))
        assert not torch.equal(state[slot], exact[slot].to(BF16))
    assert torch.equal(state[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


@pytest.mark.parametrize("name", CALLS)
def test_nobody_asks_and_states_are_rounded_to_nearest(name):
    exact, state = after(name, F32), after(name, BF16)
    assert torch.equal(state, exact.to(BF16))


def test_a_verification_that_stores_no_state_needs_no_noise(asked):
    kept = torch.zeros(B, 1, H, V, K, dtype=BF16)
    drafts = {"disable_state_update": True, "intermediate_states_buffer": kept, "cache_steps": 1}
    state = after("sglang gdn logits", BF16, disable_state_update=True)
    assert torch.equal(state, randn(*state.shape, seed=9).to(BF16))
    exact = after("sglang gdn logits", F32)
    after("sglang gdn logits", BF16, **drafts, intermediate_state_indices=torch.tensor([0, 1]))
    for b, slot in enumerate(SLOT.tolist()):
        assert torch.equal(kept[b, 0], stored(exact[slot], BF16, SEED, ROUNDS, slot, 1))


@pytest.mark.parametrize(("value", "noisy"), [("mamba:7", "vllm ssu"), ("delta:7,mamba:0", "vllm gdn"), ("7, delta:0", "sglang ssu")])
def test_noise_in_one_kind_of_layers(value, noisy, asked, monkeypatch):
    monkeypatch.setenv("SSMGEN_ENGINE_NOISE", value)
    for name in ("vllm ssu", "sglang ssu", "vllm gdn", "vllm kda layer", "sglang gdn update"):
        exact, state, slot = after(name, F32)[4], after(name, BF16)[4], 4
        alike = ("ssu" in name and "ssu" in noisy) or ("ssu" not in name and "ssu" not in noisy)
        assert torch.equal(state, stored(exact, BF16, SEED, ROUNDS, slot) if alike else exact.to(BF16))


@pytest.mark.parametrize("value", ["33", "-1", "ten", "1.5", "mamba:33", "kda:10", "10,"])
def test_a_number_of_rounds_that_is_none(value, monkeypatch):
    monkeypatch.setenv("SSMGEN_ENGINE_NOISE", value)
    with pytest.raises(ConfigError, match="SSMGEN_ENGINE_NOISE"):
        after("vllm gdn", BF16)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("call", "words"), [("ssu", "states of Mamba are bfloat16"), ("gdn packed", "states of delta rules are bfloat16")])
def test_states_that_lose_accuracy_are_warned_about_once(engine, call, words, monkeypatch, caplog):
    after(f"{engine} {call}", BF16)  # no plugin is registered
    noise.watch(engine, logging.getLogger(f"{engine}.ssmgen"))
    after(f"{engine} {call}", F32)
    monkeypatch.setenv("SSMGEN_ENGINE_NOISE", "10")
    noise.rounds.cache_clear()
    after(f"{engine} {call}", BF16)
    assert not caplog.records
    monkeypatch.delenv("SSMGEN_ENGINE_NOISE")
    noise.rounds.cache_clear()
    for _ in range(2):
        after(f"{engine} {call}", BF16)
    noise.watch(engine, None)
    (told,) = [r.getMessage() for r in caplog.records]
    assert words in told and noise.FLAGS[engine] in told


def test_each_engine_s_log_gets_the_warning(caplog):
    """Also if a process has registered both; an engine that is taken back does not silence the other one."""
    for engine in noise.FLAGS:
        noise.watch(engine, logging.getLogger(f"{engine}.ssmgen"))
    after("vllm gdn packed", BF16)
    assert [(r.name, noise.FLAGS[r.name.partition(".")[0]] in r.getMessage()) for r in caplog.records] == [
        ("vllm.ssmgen", True), ("sglang.ssmgen", True)
    ]  # fmt: skip
    noise.watch("sglang", None)
    after("vllm ssu", BF16)
    noise.watch("vllm", None)
    after("vllm ssu", BF16)
    assert [r.name for r in caplog.records[2:]] == ["vllm.ssmgen"]


def test_float16_states_of_delta_rules_get_no_warning(caplog):
    noise.watch("vllm", logging.getLogger("vllm.ssmgen"))
    after("vllm gdn", torch.float16)
    noise.watch("vllm", None)
    assert not caplog.records


def test_each_call_draws_its_own_seed(monkeypatch):
    monkeypatch.setenv("SSMGEN_ENGINE_NOISE", "10")
    assert not torch.equal(after("vllm gdn", BF16), after("vllm gdn", BF16))


# The engines' own option, as their releases refuse it.

TEXTS = {
    vllm: "Stochastic rounding for Mamba cache with triton backend requires compute capability 10.0 (data center Blackwell).",
    sglang: "Stochastic rounding for the Mamba SSM cache with --mamba-backend triton requires SM100 with CUDA >= 12.8.",
}
PLACES = {vllm: "vllm.config.mamba.MambaConfig.__post_init__", sglang: "sglang.srt.arg_groups.mamba_hook.handle_mamba_backend"}


def check(engine: Any, text: str | None) -> None:
    """Calls the wrapped check of the engine's options, which raises ValueError with this text."""

    def original(given: Any) -> None:
        if text is not None:
            raise ValueError(text)

    (wrapped,) = [r for r in engine._ENGINE.replacements if r.place == PLACES[engine]]
    wrapped.function(original, SimpleNamespace())


@pytest.mark.parametrize("engine", TEXTS, ids=["vllm", "sglang"])
def test_the_own_option_is_accepted_where_ssmgen_serves_it(engine, monkeypatch):
    monkeypatch.setattr(engine._ENGINE, "outcome", {engine._noise.STEP: "replaced when it is imported"})
    check(engine, TEXTS[engine])
    check(engine, None)
    with pytest.raises(ValueError, match="rounds must be"):
        check(engine, "rounds must be non-negative")


@pytest.mark.parametrize("engine", TEXTS, ids=["vllm", "sglang"])
def test_the_own_option_is_refused_where_the_step_stays_the_engine_s(engine, monkeypatch):
    monkeypatch.setattr(engine._ENGINE, "outcome", {engine._noise.STEP: "kept: SSMGEN_ENGINE_KEEP names it"})
    with pytest.raises(ValueError, match=r"(10\.0|SM100).*but .*selective_state_update is .*'s own: kept: SSMGEN_ENGINE_KEEP names it"):
        check(engine, TEXTS[engine])


@pytest.mark.parametrize("engine", TEXTS, ids=["vllm", "sglang"])
def test_a_refused_call_does_not_reach_a_kernel_that_the_gpu_lacks(engine, monkeypatch, caplog):
    """The error has the reason of the refusal, of a capture without warm-up the step that mends it, and no warning says that the engine's
    own kernel runs."""

    def refusing(*_: Any, **__: Any) -> None:
        raise CaptureError("a kernel", "sm_90a", "selective_state_update")

    state, ran = SimpleNamespace(is_cuda=True, device="cuda:0"), []
    (step,) = [r for r in engine._ENGINE.replacements if r.place == engine._noise.STEP]
    call = engine._ENGINE.with_the_original_behind(changed(step, function=refusing), lambda *_, **options: ran.append(options))
    monkeypatch.setattr(noise, "major", lambda _: 9)
    with pytest.raises(UnsupportedError, match=f"{engine._ENGINE.package}'s selective_state_update") as error:
        call(state, enable_stochastic_rounding=True)
    reason, own = error.value.reasons
    assert "is not loaded" in reason and "a step of the same batch size before the capture" in reason
    assert "leave --enable-mamba-cache-stochastic-rounding out" in own and not ran and not caplog.records
    call(state, enable_stochastic_rounding=False)
    monkeypatch.setattr(noise, "major", lambda _: 10)
    call(state, enable_stochastic_rounding=True)
    assert len(ran) == 2
