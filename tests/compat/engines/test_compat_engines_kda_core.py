"""vLLM's methods for a step with prompts of Kimi delta attention: states in their pool, against tokens one by one in float64."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from delta_oracles import BF16, CHUNK, F32, K, close, randn, starts_of
from engine_calls import no_call_goes_to_the_engine, pages, vllm_functions  # noqa: F401
from torch import Tensor

from ssmgen.compat import vllm as plugin
from ssmgen.compat.shared import replacing
from ssmgen.compat.vllm import causal_conv1d_fn, causal_conv1d_update, flashkda
from ssmgen.compat.vllm.kda_prompts import eager_break

LAYERS = {
    "linear": ("vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn", "KimiGatedDeltaNetAttention"),
    "k3": ("vllm.models.kimi_k3.nvidia.kda", "KimiK3DeltaAttention"),
    "glm": ("vllm.models.glm5next.common.kda", "Glm5NextLinearAttention"),
    "bailing": ("vllm.model_executor.models.bailing_moe_v3", "BailingMoeV3KimiDeltaAttention"),
}
H, WIDTH, PAD = 2, 4, 3
CHANNELS, LENGTHS = 3 * H * K, [1, 66, 5]
SLOTS, STARTED = torch.tensor([4, 2, 7], dtype=torch.int32), torch.tensor([True, True, False])
# Drafts of two sequences and of one that is padding, with the slots of each token, and how many of the tokens before were accepted.
COUNTS, ACCEPTED = [3, 2, 1], torch.tensor([2, 1, 1], dtype=torch.int32)
TABLE = torch.tensor([[1, 3, 6], [8, 5, 0], [0, 0, 0]], dtype=torch.int32)


def walk(x: dict[str, Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
    """One sequence of KDA in float64: (outputs [T, H, K], states [H, K, K] before the first token and after each)."""
    q, k, v, g, beta = (x[n].double() for n in ("q", "k", "v", "g", "beta"))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    S = torch.zeros(H, K, K, dtype=torch.float64) if before is None else before.double()
    each, out = [S], []
    for t in range(v.shape[0]):
        S = S * g[t].exp()[:, None]
        S = S + (beta[t, :, None] * (v[t] - (S * k[t, :, None]).sum(-1)))[..., None] * k[t, :, None]
        out.append(K**-0.5 * (S * q[t, :, None]).sum(-1))
        each.append(S)
    return torch.stack(out), torch.stack(each)


class Step:
    """A layer, its arguments, and a forward context of three prompts, the first of which goes on with one token.

    drafts: where the step also has drafts: "between" prompts, "before" or "after" them
    """

    def __init__(self, kind: str, backend: str = "flashkda", dtype: torch.dtype = F32, checkpoint: bool = False, drafts: str | None = None):
        self.kind, (self.module, self.owner) = kind, LAYERS[kind]
        self.tokens = sum(LENGTHS) + (sum(COUNTS) if drafts else 0)
        total = self.tokens + PAD
        self.window, self.state = pages(9, CHANNELS, WIDTH - 1 + 2 * bool(drafts), dtype=BF16), pages(9, H, K, K, dtype=dtype)
        self.bound = -5.0 if kind != "linear" else None
        wide = randn(total, CHANNELS + 6, seed=1)
        self.call: dict[str, Tensor] = {
            "qkv_proj_states" if kind == "glm" else "mixed_qkv": wide[:, :CHANNELS], "g1": randn(1, total, H, K, seed=2),
            "beta": randn(1, total, H, seed=3), "core_attn_out": torch.full((1, total, H, K), 7.0, dtype=BF16),
        }  # fmt: skip
        self.rows, self.raw = wide[:, :CHANNELS], {n: self.call[n] for n in ("g1", "beta")}
        if kind in ("linear", "k3"):
            self.call["g2"] = randn(total, H, K, seed=4)
        self.exported: dict[str, Any] = {}
        weight = randn(CHANNELS, 1, WIDTH, seed=5, dtype=F32) / 2
        self.layer = SimpleNamespace(
            prefix="layers.0", kv_cache=(self.window, self.state), A_log=randn(1, 1, H, 1, seed=6, dtype=F32) / 4,
            dt_bias=randn(H * K, seed=7, dtype=F32), conv1d=SimpleNamespace(weight=weight, bias=None), kda_prefill_backend=backend,
            gate_lower_bound=self.bound, kda_lower_bound=-5.0, kda_safe_gate=True, _conv_state_dim_first=True,
            _merged_conv_weight=weight.squeeze(1), q_conv1d=SimpleNamespace(bias=None), o_norm=self.norm, use_recoverssm=False,
            _flashkda_buffer_specs=tuple(((4, H, K, K), dtype) for _ in range(4)),
            _checkpoint_exporter=SimpleNamespace(export=lambda checkpoint, **more: self.exported.update(more, checkpoint=checkpoint)),
        )  # fmt: skip
        if kind == "bailing":  # its gates come ready, and its convolutions one by one
            del self.call["mixed_qkv"]
            self.call |= dict(zip(("q_proj_states", "k_proj_states", "v_proj_states"), self.rows.split(H * K, 1), strict=True))
            for name, part in zip("qkv", weight.split(H * K), strict=True):
                vars(self.layer)[f"{name}_conv1d"] = SimpleNamespace(weight=part, bias=None)
            self.layer.head_dim = K
            self.call |= {"g1": self.gates().float()[None], "beta": self.raw["beta"].float().sigmoid()}
        offsets = [0, CHUNK, 0]
        kept = SimpleNamespace(checkpoint_offsets=torch.tensor(offsets), offsets=offsets) if checkpoint else None
        self.metadata = SimpleNamespace(
            num_prefills=3, num_decodes=0, num_spec_decodes=0, spec_sequence_masks=None, num_actual_tokens=self.tokens,
            non_spec_query_start_loc=starts_of(LENGTHS), non_spec_state_indices_tensor=SLOTS, has_initial_state=STARTED, checkpoint=kept,
        )  # fmt: skip
        if drafts:
            self.draft(drafts)

    def draft(self, where: str) -> None:
        """Makes the step one with drafts. Only Kimi-K3's metadata says where they begin, and only if they are consecutive."""
        mine = {"between": [0, 1, 2, 4, 5, 74], "before": range(6), "after": range(72, 78)}[where]
        self.drafts = torch.tensor(mine)
        self.others = torch.tensor([i for i in range(self.tokens) if i not in self.drafts])
        vars(self.metadata).update(
            num_spec_decodes=len(COUNTS), num_spec_decode_tokens=sum(COUNTS), num_prefill_tokens=sum(LENGTHS), num_decode_tokens=0,
            spec_sequence_masks=None if self.kind == "k3" else torch.ones(6, dtype=torch.bool), spec_state_indices_tensor=TABLE,
            spec_query_start_loc=starts_of(COUNTS), num_accepted_tokens=ACCEPTED, spec_token_indx=self.drafts,
            non_spec_token_indx=self.others,
        )  # fmt: skip
        if self.kind == "k3":
            begin = {"between": (None, None), "before": (0, 6), "after": (72, 0)}[where]
            self.metadata.spec_token_start, self.metadata.non_spec_token_start = begin

    def gates(self) -> Tensor:
        """Log decays [tokens, H, K] in float64, of the raw gates."""
        raw, rate = self.raw["g1"][0].double() + self.layer.dt_bias.double().view(H, K), self.layer.A_log.double().exp().view(H, 1)
        return -rate * raw.exp().log1p() if self.bound is None else self.bound * (rate * raw).sigmoid()

    def norm(self, y: Tensor, z: Tensor) -> Tensor:
        """In the place of the layer's: without a rounding."""
        assert z is self.call["g2"] and y is self.call["core_attn_out"]
        return y * 2

    def run(self, monkeypatch) -> Any:
        module = import_module(self.module)
        monkeypatch.setattr(module, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layers.0": self.metadata}))
        monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: True, raising=False)
        return getattr(module, self.owner)._forward(self.layer, **self.call)


CASES = [
    pytest.param("linear", "auto", False, id="kimi-linear"), pytest.param("k3", "triton", False, id="k3-triton"),
    pytest.param("k3", "flashkda", True, id="k3-checkpoints"), pytest.param("glm", "flashkda", False, id="glm"),
    pytest.param("glm", "flashkda", True, id="glm-checkpoints"), pytest.param("glm", "triton", False, id="glm-triton"),
    pytest.param("bailing", "", False, id="bailing"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("kind", "backend", "checkpoint"), CASES)
def test_a_step_with_prompts(vllm, monkeypatch, kind, backend, checkpoint, dtype):
    """A fresh prompt does not read its slot; other slots and padded rows stay as they are."""
    monkeypatch.setattr(flashkda._Places, "aligned", True)
    step = Step(kind, backend, dtype, checkpoint)
    window, kept, call, layer, n = step.window.clone(), step.state.clone(), step.call, step.layer, step.tokens
    assert step.run(monkeypatch) is None
    starts = starts_of(LENGTHS)
    rows = step.rows[:n]
    mixed = causal_conv1d_fn(rows.t(), layer.conv1d.weight.squeeze(1), None, window, starts, SLOTS, STARTED, activation="silu").t()
    assert torch.equal(step.window, window), "the windows are those that the convolution leaves"
    q, k, v = (t.unflatten(1, (H, K)) for t in mixed.split(H * K, 1))
    tokens = {"q": q, "k": k, "v": v, "g": step.gates()[:n], "beta": step.raw["beta"][0, :n].double().sigmoid()}
    got = call["core_attn_out"][0, :n] / (1 if kind in ("glm", "bailing") else 2)
    for i, slot in enumerate(SLOTS.tolist()):
        at = slice(int(starts[i]), int(starts[i + 1]))
        y, each = walk({name: t[at] for name, t in tokens.items()}, kept[slot] if STARTED[i] else None)
        assert close(got[at], y) and close(step.state[slot], each[-1])
        if checkpoint and LENGTHS[i] > CHUNK:
            assert close(step.exported["recurrent_checkpoint"][i], each[CHUNK])
        step.state[slot] = kept[slot]
    assert torch.equal(step.state, kept), "another slot was written"
    assert checkpoint == bool(step.exported)
    if checkpoint:
        assert step.exported["recurrent_state"] is step.state and torch.equal(step.exported["raw_qkv"], rows)
    if kind in ("glm", "bailing"):
        assert (call["core_attn_out"][0, n:] == 7).all()


DRAFTS = [*CASES, pytest.param("k3", "flashkda", True, id="k3-before"), pytest.param("k3", "triton", False, id="k3-after")]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("kind", "backend", "checkpoint"), DRAFTS)
def test_a_step_with_prompts_and_drafts(vllm, monkeypatch, request, kind, backend, checkpoint, dtype):
    """Prompts have the bits of a step without drafts. Drafts continue from the last accepted token and keep a state each, as in float64."""
    monkeypatch.setattr(flashkda._Places, "aligned", True)
    where = next((w for w in ("before", "after") if w in request.node.name), "between")
    step = Step(kind, backend, dtype, checkpoint, where)
    window, kept, call, layer = step.window.clone(), step.state.clone(), step.call, step.layer
    assert step.run(monkeypatch) is None
    starts, rows = starts_of(COUNTS), step.rows[step.drafts]
    weight, out = layer.conv1d.weight.squeeze(1), call["core_attn_out"][0] / (1 if kind in ("glm", "bailing") else 2)
    mixed = causal_conv1d_update(
        rows.clone(), window, weight, None, "silu", conv_state_indices=TABLE[:, 0], num_accepted_tokens=ACCEPTED, query_start_loc=starts,
        max_query_len=3,
    )  # fmt: skip
    q, k, v = (t.unflatten(1, (H, K)) for t in mixed.split(H * K, 1))
    tokens = {"q": q, "k": k, "v": v, "g": step.gates()[step.drafts], "beta": step.raw["beta"][0, step.drafts].double().sigmoid()}
    expected = kept.clone()
    for i, slots in enumerate(TABLE.tolist()):
        at = slice(int(starts[i]), int(starts[i + 1]))
        if not slots[0]:
            assert not out[step.drafts[at]].any()
            continue
        y, each = walk({name: t[at] for name, t in tokens.items()}, kept[slots[int(ACCEPTED[i]) - 1]])
        assert close(out[step.drafts[at]], y)
        for t, slot in enumerate(slots[: COUNTS[i]]):
            assert close(step.state[slot], each[t + 1])
            expected[slot] = step.state[slot]
    alone = Step(kind, backend, dtype, checkpoint)
    alone.window, alone.state, alone.layer.kv_cache = window, expected, (window, expected)
    for name, t in alone.call.items():
        axis = int(t.shape[0] == 1)
        t.narrow(axis, 0, len(step.others)).copy_(call[name].index_select(axis, step.others))
    alone.call["core_attn_out"].fill_(7.0)
    alone.run(monkeypatch)
    theirs = alone.call["core_attn_out"][0, : len(step.others)]
    assert torch.equal(call["core_attn_out"][0, step.others], theirs) and torch.equal(step.window, window)
    assert torch.equal(step.state, expected), "another slot was written"
    assert checkpoint == bool(step.exported)
    if checkpoint:
        assert torch.equal(step.exported["raw_qkv"], step.rows[step.others])
        assert torch.equal(step.exported["recurrent_checkpoint"], alone.exported["recurrent_checkpoint"])
    if kind in ("glm", "bailing"):
        assert (call["core_attn_out"][0, step.tokens :] == 7).all()


@pytest.mark.parametrize("why", ["no step", "no prompts", "RecoverSSM", "decode rows", "backend", "checkpoints at 16", "weights"])
def test_steps_that_are_the_engine_s_own(vllm, monkeypatch, why):
    """Without a warning: the functions that these methods call are replaced."""
    monkeypatch.setattr(flashkda._Places, "aligned", True)
    step = Step("glm" if why == "weights" else "k3", checkpoint=why == "checkpoints at 16")
    changes: dict[str, Any] = {
        "no prompts": {"num_prefills": 0}, "RecoverSSM": {"num_spec_decodes": 1}, "decode rows": {"num_spec_decodes": 1, "num_decodes": 1}
    }  # fmt: skip
    vars(step.metadata).update(changes.get(why, {}))
    step.layer.use_recoverssm = why == "RecoverSSM"
    if why == "no step":
        step.metadata = None
    elif why == "backend":
        step.layer.kda_prefill_backend = "flashinfer"
    elif why == "weights":
        step.layer._merged_conv_weight = None
    elif why == "checkpoints at 16":
        step.metadata.checkpoint.offsets = [0, 16, 0]
    assert str(step.run(monkeypatch)).startswith("the engine's")


@pytest.mark.refused
@pytest.mark.parametrize("why", ["a pool of another width", "a kept function", "counts of drafts"])
def test_refused_before_anything_is_written(vllm, monkeypatch, caplog, why):
    step = Step("linear", "auto", drafts="between" if why == "counts of drafts" else None)
    if why == "a kept function":
        place = "vllm.models.kimi_k3.nvidia.ops.third_party.kda.chunk.chunk_kda_with_fused_gate"
        monkeypatch.setitem(plugin._ENGINE.outcome, place, "kept")
    elif why == "counts of drafts":
        step.metadata.num_accepted_tokens = ACCEPTED[:2]
    else:
        step.layer.kv_cache = (step.window, step.state[..., : K - 8])
    before = [t.clone() for t in (step.window, step.state, step.call["core_attn_out"])]
    assert str(step.run(monkeypatch)).startswith("the engine's")
    assert all(map(torch.equal, before, (step.window, step.state, step.call["core_attn_out"])))
    said = {"a kept function": "chunk_kda_with_fused_gate is vllm's own", "counts of drafts": "num_accepted_tokens is [2]"}
    assert said.get(why, "channels") in caplog.text


def test_the_engine_s_decorator_stays_around_ours(monkeypatch):
    """A breakable graph runs the decorated method between its segments, and replays what it ran: ours and its fallback are inside."""
    breaks: list[Any] = []
    graphs = ModuleType("vllm.compilation.breakable_cudagraph")

    def eager_break_during_capture(function):
        def wrapper(*args, **kwargs):
            breaks.append(function)
            return function(*args, **kwargs)

        wrapper.__wrapped__ = function
        return wrapper

    graphs.eager_break_during_capture = eager_break_during_capture
    for name in ("vllm", "vllm.compilation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, graphs.__name__, graphs)

    class Layer:
        @eager_break_during_capture
        def _forward(self, x):
            return "the engine's", x

    def ours(self, x):
        if x < 0:
            raise replacing.NotReplaced
        return "ours", x

    module = ModuleType("vllm.layer")
    module.Layer = Layer
    replacement = replacing.Replacement("vllm.layer", "Layer._forward", ours, decorated=eager_break)
    engine, original = replacing.Engine("vllm", "0", [replacement]), Layer.__dict__["_forward"]
    engine.replace(replacement, module)
    assert Layer()._forward(1) == ("ours", 1) and Layer()._forward(-1) == ("the engine's", -1)
    assert len(breaks) == 2 and breaks[0] is breaks[1] is not original.__wrapped__, "the fallback breaks no second time"
    engine.unregister()
    assert Layer.__dict__["_forward"] is original
