"""The engines' functions on the operands of ssmgen's own cases: strided, poisoned, guarded, and with those cases' bounds.

A form is one way in which an engine calls one function. The family's own cases (`ssu_cases` and the others) make its operands. Their
float64 results and bounds then hold for the engine's call, with padding, unused slots and guards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import combine_cases
import conv_cases
import conv_laws
import decode_cases
import la_cases
import norm_cases
import ssu_cases
import ssu_token_cases
from conv_cases import I32, I64, ROLL
from la_cases import RAW
from ssu_cases import BF16, F16, F32
from torch import Tensor

_POSITIONAL = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus")
_MAKERS = {ssu_cases: ssu_cases.make_call, ssu_token_cases: ssu_token_cases.make_call, la_cases: la_cases.make_call}
_MAKERS |= {conv_laws: conv_cases.make, combine_cases: combine_cases.make, norm_cases: norm_cases.make}


@dataclass(frozen=True)
class Form:
    """engine, name: the function, as the fixtures of engine_calls hold it; laws: the module that knows its expected results.

    arguments: makes the engine's operands from the case's. relay: changes operands first, within the case's meaning.
    """

    id: str
    engine: str
    name: str
    laws: ModuleType
    case: Any
    arguments: Callable[[dict[str, Any]], dict[str, Any]]
    relay: Callable[[Any], None] = lambda call: None

    def make(self, device: str, seed: int = 0) -> Any:
        call = _MAKERS[self.laws](self.case, device, seed)
        self.relay(call)
        call.memory.seal()
        return call

    def expected(self, call: Any) -> Any:
        loose = call.memory.device == "cpu" and self.laws in (la_cases, ssu_token_cases)  # there, sums are torch's
        return self.laws.expected(call, **{"any_order": True} if loose else {})

    def prepared(self, function: Callable[..., Any], call: Any) -> Callable[[], Any]:
        """The engine's call. A result that is a new tensor is copied to where the case expects it."""
        given, out = self.arguments(operands(call)), operands(call)["out"]

        def run() -> Any:
            got = function(**given)
            results = got if isinstance(got, tuple) else (got,)
            if isinstance(results[0], Tensor) and results[0].data_ptr() != out.data_ptr():
                out.copy_(results[0].view(out.shape))
            return got

        return run

    def check(self, call: Any, want: Any) -> None:
        (decode_cases if self.laws is la_cases else self.laws).assert_matches(call, want)


def operands(call: Any) -> dict[str, Any]:
    """A call's arguments by name."""
    return dict(zip(_POSITIONAL, getattr(call, "args", ()), strict=False)) | call.kwargs


def load(call: Any, other: Any) -> None:
    """Everything that the other one's tensors hold, guards included."""
    for name, (buffer, *_) in other.memory.buffers.items():
        call.memory.buffers[name][0].copy_(buffer)


def longer(t: Tensor) -> Tensor:
    """Adds two rows of the tensor's guard: negative numbers."""
    return t.as_strided((t.shape[0] + 2, *t.shape[1:]), t.stride())


# Mamba


def _transposed(call: Any) -> None:
    """Mamba-1's operands are [dim, batch] in memory."""
    given = operands(call)
    for name in ("x", "dt", "z", "out"):
        old = given[name]
        given[name] = call.memory.view(name, tuple(old.shape), (1, old.shape[0] + 3), old.dtype).copy_(old)
    call.args = tuple(given[n] for n in _POSITIONAL)
    call.kwargs["out"] = given["out"]


def _zero_accepted_is_like_one(call: Any) -> None:
    """A padded sequence gets a count that is too large, because 0 is not padding here."""
    accepted = call.kwargs["num_accepted_tokens"]
    accepted[accepted == 0] = 1000
    accepted[accepted == 1] = 0


def _mamba(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that both engines pass alike. A, D, dt and dt_bias of heads are expanded, as the layers do."""
    given = {n: t for n, t in given.items() if n in (*_POSITIONAL, "out")}
    if given["x"].dim() > 2:
        H, P, N = given["state"].shape[1:]
        shapes = {"A": (H, P, N), "D": (H, P), "dt_bias": (H, P), "dt": (*given["x"].shape[:-1], P)}
        for name, shape in shapes.items():
            t = given.get(name)
            if t is not None and tuple(t.shape) != shape:
                given[name] = t[(..., *[None] * (len(shape) - t.dim()))].expand(shape)
    return given


def _vllm_step(given: dict[str, Any]) -> dict[str, Any]:
    """Slots are a column of a table with rows to spare."""
    column = longer(given["state_indices"])[:, None]
    return _mamba(given) | {"state_batch_indices": column, "dst_state_batch_indices": column}


def _vllm_two_tables(given: dict[str, Any]) -> dict[str, Any]:
    slots = {"state_batch_indices": given["state_indices"], "dst_state_batch_indices": given["dst_state_indices"]}
    return _mamba(given) | slots


def _vllm_speculative(given: dict[str, Any]) -> dict[str, Any]:
    table = longer(given["state_indices"])
    more = {"num_accepted_tokens": longer(given["num_accepted_tokens"]), "cu_seqlens": given["cu_seqlens"], "is_blackwell": True}
    return _mamba(given) | {"state_batch_indices": table, "dst_state_batch_indices": table} | more


def _noisy(arguments: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: arguments(given) | {"enable_stochastic_rounding": True}


def _sglang_step(given: dict[str, Any]) -> dict[str, Any]:
    return _mamba(given) | {"state_batch_indices": longer(given["state_indices"])}


def _sglang_verify(given: dict[str, Any]) -> dict[str, Any]:
    kept = given["intermediate_states"]
    more = {"intermediate_states_buffer": kept, "cache_steps": kept.shape[1], "disable_state_update": True}
    more |= {"intermediate_state_indices": longer(given["intermediate_state_indices"])}
    return _sglang_step(given) | more | {"retrieve_parent_token": given.get("parents")}


# The convolution


def _renamed(given: dict[str, Any], **names: str) -> dict[str, Any]:
    """The operands that are present, renamed. The pad slot and operands whose new name is empty are dropped."""
    names = {"pad_slot_id": ""} | names
    return {names.get(n, n): t for n, t in given.items() if names.get(n, n)}


def _vllm_conv(given: dict[str, Any]) -> dict[str, Any]:
    if given["out"] is given["x"]:
        given = {n: t for n, t in given.items() if n != "out"}
    return _renamed(given) | {"conv_state_indices": longer(given["conv_state_indices"])}


def _vllm_conv_of_drafts(given: dict[str, Any]) -> dict[str, Any]:
    buffers = {n: longer(given[n]) for n in ("num_accepted_tokens", "query_start_loc") if n in given}
    return _renamed(given, out="") | buffers | {"max_query_len": 9}


def _prefill(given: dict[str, Any]) -> dict[str, Any]:
    return _renamed(given, conv_state_indices="cache_indices", out="")


def _sglang_conv(given: dict[str, Any]) -> dict[str, Any]:
    buffers = {n: longer(given[n]) for n in ("conv_state_indices", "num_accepted_tokens", "cache_seqlens") if n in given}
    return _renamed(given | buffers, out="", num_accepted_tokens="num_accept_tokens")


# Gated delta rules


def _packed_decode(given: dict[str, Any]) -> dict[str, Any]:
    """q, k and v lie one after the other, in a part of a wider row."""
    q, k, v = (given[n] for n in "qkv")
    channels = sum(t.shape[1] * t.shape[2] for t in (q, k, v))
    rest = {"scale": given["scale"], "initial_state": given["state"], "use_qk_l2norm_in_kernel": True}
    more = {"mixed_qkv": q.as_strided((q.shape[0], channels), (q.stride(0), 1)), "ssm_state_indices": longer(given["state_indices"])}
    return _gate(given) | rest | more | {"out": given["out"][:, None]}


def _gate(given: dict[str, Any]) -> dict[str, Any]:
    return {"a": given["g"], "b": given["beta"], "A_log": given["A_log"], "dt_bias": given["dt_bias"]}


def _vllm_rule(given: dict[str, Any]) -> dict[str, Any]:
    more = {"num_accepted_tokens": longer(given["num_accepted_tokens"])} if "num_accepted_tokens" in given else {}
    more |= {"cu_seqlens": given["cu_seqlens"]} if "cu_seqlens" in given else {}
    return {n: given[n] for n in "qkv"} | more | {
        "initial_state": given["state"], "ssm_state_indices": longer(given["state_indices"]), "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def _vllm_gates(given: dict[str, Any]) -> dict[str, Any]:
    return _vllm_rule(given) | {"g": given["g"], "beta": given["beta"]}


def _vllm_sigmoid(given: dict[str, Any]) -> dict[str, Any]:
    return _vllm_rule(given) | _gate(given) | {"is_kda": given["g"].dim() > given["beta"].dim()}


def _kimi(given: dict[str, Any]) -> dict[str, Any]:
    rest = {n: t for n, t in _vllm_rule(given).items() if n != "use_qk_l2norm_in_kernel"}
    return rest | _kimi_gate(given) | {"out": given["out"]}


def _kimi_gate(given: dict[str, Any]) -> dict[str, Any]:
    return {"raw_g": given["g"], "raw_beta": given["beta"], "lower_bound": given.get("lower_bound")} | {
        n: given[n] for n in ("A_log", "dt_bias")
    }


def _kimi_packed(given: dict[str, Any]) -> dict[str, Any]:
    packed, gate = _packed_decode(given), _kimi_gate(given)
    gate |= {n: gate[n][None] for n in ("raw_g", "raw_beta")}
    rest = {"mixed_qkv": packed["mixed_qkv"], "state_indices": packed["ssm_state_indices"], "initial_state": given["state"]}
    return rest | gate | {"scale": given["scale"], "out": given["out"][None]}


def _packed_of_channels(given: dict[str, Any]) -> dict[str, Any]:
    """The gate per key channel is one row."""
    return _packed_decode(given) | {"a": given["g"].flatten(1), "lower_bound": given.get("lower_bound")}


def _sglang_drafts(given: dict[str, Any]) -> dict[str, Any]:
    kept = given["intermediate_states"]
    rows = {"intermediate_state_indices": longer(given["intermediate_state_indices"]), "cache_steps": kept.shape[1]}
    tree = {"retrieve_parent_token": longer(given["parents"])} if "parents" in given else {}
    return _sglang_sigmoid(given) | {"intermediate_states_buffer": kept} | rows | tree


def _sglang_sigmoid(given: dict[str, Any]) -> dict[str, Any]:
    tokens = {n: given[n] for n in ("q", "k", "v", "cu_seqlens") if n in given}
    return tokens | _gate(given) | {
        "A_log": given["A_log"][None, None, :, None], "softplus_beta": 1.0, "softplus_threshold": 20.0, "use_qk_l2norm_in_kernel": True,
        "initial_state_source": given["state"], "initial_state_indices": longer(given["state_indices"]),
        "is_kda": given["g"].dim() > given["beta"].dim(), "lower_bound": given.get("lower_bound"),
        "disable_state_update": not given["update_state"],
    }  # fmt: skip


# Norms


def _row_norm(given: dict[str, Any]) -> dict[str, Any]:
    how = {n: given[n] for n in ("x", "weight", "eps", "group_size", "norm_before_gate", "activation")}
    return how | {"bias": None, "z": given["gate"], "is_rms_norm": True}


def _row_norm_into(given: dict[str, Any]) -> dict[str, Any]:
    return _row_norm(given) | {"out": given["out"]}


def _head_norm(given: dict[str, Any]) -> dict[str, Any]:
    """The gate has an axis less."""
    how = {n: given[n] for n in ("x", "weight", "eps", "activation")}
    return how | {"g": given["gate"][0] if given["gate"].dim() > 3 else given["gate"], "bias": None}


# Merging


def _vllm_merge(given: dict[str, Any]) -> dict[str, Any]:
    """LSEs are [heads, tokens]."""
    prefix, suffix = given["o"]
    lses = {n: t.t() for n, t in zip(("prefix_lse", "suffix_lse"), given["lse"], strict=True)}
    return {"output": given["out"], "output_lse": given["lse_out"].t(), "prefix_output": prefix, "suffix_output": suffix} | lses


def _sglang_merge(given: dict[str, Any]) -> dict[str, Any]:
    (prefix, suffix), (prefix_lse, suffix_lse) = given["o"], given["lse"]
    outputs = {"output": given["out"], "output_lse": given["lse_out"]}
    return {"prefix_output": prefix, "prefix_lse": prefix_lse, "suffix_output": suffix, "suffix_lse": suffix_lse} | outputs


_M2 = ssu_cases.Case("m2", heads=4, groups=2, index=I32, conv_slices=True, slot_gap=24, batch=6)
_M1 = ssu_cases.Case("m1", headdim=136, d_state=16, tied=False, z=BF16, index=I32, batch=6)
_DRAFTS = ssu_token_cases.Case("drafts", lengths=(3, 2, 1, 0, 3, 4), dst="own", accepted=I32, packed=8, slot_gap=24)
_VERIFY = ssu_token_cases.Case("verify", tokens=4, kept=BF16, rows=I32, update=False, state=BF16)
_NOISY = ssu_token_cases.Case("noisy", tokens=None, state=F16, seed="one")
_CONV = conv_cases.UpdateCase("conv", state="channels", in_place=True)
_WINDOWS = conv_cases.UpdateCase("windows", state="channels", saved="windows", saved_index=I32, tokens=4, batch=8)
_PROMPTS = replace(conv_cases.LAST, id="prompts", lengths=conv_cases.SHORT, pool=True, started=True, index=I32)
_GDN = la_cases.Case("gdn", **RAW, V=128, state=BF16, scale=0.25, batch=6)
_STEPS = replace(_GDN, scale=None, lengths=(1,) * 6, tokens=1)
_GDN_DRAFTS = replace(_STEPS, lengths=(3, 2, 1, 0, 3, 4), dst="own", accepted=I32, slot_gap=8)
_KEPT = replace(_STEPS, lengths=(3, 2, 1, 0, 3, 4), kept=0, rows=I32, update=False)
_KDA = {"rule": "kda", "bias": "flat"}
_PACKED_KDA = "fused_recurrent_kda_packed_decode"
_ROWS, _HEADS = replace(norm_cases.MAMBA, id="rows", layout="gaps"), replace(norm_cases.KDA, id="heads", rows=(1, 5), in_place="x")
_PAIR = replace(combine_cases.PAIR, id="pair")
_SSU, _UPDATE, _SIGMOID = "selective_state_update", "causal_conv1d_update", "fused_sigmoid_gating_delta_rule_update"
_PACKED_DECODE = "fused_recurrent_gated_delta_rule_packed_decode"
_STATES = {"f32": F32, "f16": F16, "bf16": BF16}


def _vllm() -> list[Form]:
    def form(id: str, name: str, laws: ModuleType, case: Any, arguments: Any, relay: Any = Form.relay, **changes: Any) -> Form:
        changes |= {"pad_slot_id": 0} if hasattr(case, "pad_slot_id") else {}
        return Form(f"vllm-{id}", "vllm", name, laws, replace(case, **changes), arguments, relay)

    return [
        *[form(f"m2-{n}", "ssu_backend", ssu_cases, _M2, _vllm_step, state=t) for n, t in _STATES.items()],
        form("m2-two-tables", "ssu_backend", ssu_cases, _M2, _vllm_two_tables, split=True, state=BF16),
        form("m1", "ssu_backend", ssu_cases, _M1, _vllm_step, _transposed),
        form("m1-slices", "ssu_backend", ssu_cases, _M1, _vllm_step, conv_slices=True, state=BF16),
        form("m2-drafts", "ssu_backend", ssu_token_cases, _DRAFTS, _vllm_speculative, _zero_accepted_is_like_one),
        form("m2-drafts-bf16", "ssu_backend", ssu_token_cases, _DRAFTS, _vllm_speculative, _zero_accepted_is_like_one, state=BF16),
        form("m2-noisy", _SSU, ssu_token_cases, _NOISY, _noisy(_vllm_step)),
        form("conv", _UPDATE, conv_laws, _CONV, _vllm_conv),
        form("conv-windows-out", _UPDATE, conv_laws, _CONV, _vllm_conv, state="windows", in_place=False),
        form("conv-tokens", _UPDATE, conv_laws, _CONV, _vllm_conv, tokens=3),
        form("conv-drafts", _UPDATE, conv_laws, _CONV, _vllm_conv_of_drafts, advance=ROLL, lengths=(3, 1, 0, 2, 2, 4, 1)),
        form("conv-packed", _UPDATE, conv_laws, _CONV, _vllm_conv_of_drafts, lengths=(3, 1, 0, 2, 2, 4, 1), in_place=True),
        form("conv-prompts", "causal_conv1d_fn", conv_laws, _PROMPTS, _prefill),
        form("gdn-packed", _PACKED_DECODE, la_cases, _GDN, _packed_decode, packed=8),
        form("gdn-packed-odd", _PACKED_DECODE, la_cases, _GDN, _packed_decode, packed=1, state=F32),
        form("gdn-steps", _SIGMOID, la_cases, _STEPS, _vllm_sigmoid),
        form("gdn-drafts", _SIGMOID, la_cases, _GDN_DRAFTS, _vllm_sigmoid),
        form("kda-drafts", _SIGMOID, la_cases, _GDN_DRAFTS, _vllm_sigmoid, **_KDA),
        form("gdn-gates", "fused_recurrent_gated_delta_rule", la_cases, _STEPS, _vllm_gates, gate="log", beta="plain", lengths=()),
        form("kda-raw-drafts", "fused_recurrent_kda_with_fused_gate", la_cases, _GDN_DRAFTS, _kimi, **_KDA),
        form("kda-bounded", "fused_recurrent_kda_with_fused_gate", la_cases, _STEPS, _kimi, gate="bounded", **_KDA),
        form("kda-packed", _PACKED_KDA, la_cases, _GDN, _kimi_packed, packed=8, **_KDA),
        form("norm-rows", "layer_norm_fwd", norm_cases, _ROWS, _row_norm_into),
        form("norm-heads", "rms_norm_gated", norm_cases, _HEADS, _head_norm),
        form("merge", "merge_attn_states", combine_cases, _PAIR, _vllm_merge),
        form("merge-in-place", "merge_attn_states", combine_cases, _PAIR, _vllm_merge, in_place=True),
    ]


def _sglang() -> list[Form]:
    def form(id: str, name: str, laws: ModuleType, case: Any, arguments: Any, relay: Any = Form.relay, **changes: Any) -> Form:
        return Form(f"sglang-{id}", "sglang", name, laws, replace(case, **changes), arguments, relay)

    return [
        *[form(f"m2-{n}", "ssu_backend", ssu_cases, _M2, _sglang_step, state=t) for n, t in _STATES.items()],
        form("m1", "ssu_backend", ssu_cases, _M1, _sglang_step, _transposed),
        form("m2-verify", "ssu_backend", ssu_token_cases, _VERIFY, _sglang_verify),
        form("m2-tree", "ssu_backend", ssu_token_cases, _VERIFY, _sglang_verify, parents=I32),
        form("m2-noisy", _SSU, ssu_token_cases, _NOISY, _noisy(_sglang_step)),
        form("conv", _UPDATE, conv_laws, _CONV, _sglang_conv),
        form("conv-ring", _UPDATE, conv_laws, _CONV, _sglang_conv, advance=conv_cases.RING, extra=3),
        form("conv-triton", "causal_conv1d_update_triton", conv_laws, _CONV, _sglang_conv, in_place=False),
        form("conv-drafts", "causal_conv1d_update_triton", conv_laws, _CONV, _sglang_conv, in_place=False, advance=ROLL, tokens=4),
        form("conv-windows", "causal_conv1d_update_triton", conv_laws, _WINDOWS, _sglang_conv),
        form("conv-prompts", "causal_conv1d_fn", conv_laws, _PROMPTS, _prefill),
        form("gdn-packed", _PACKED_DECODE, la_cases, _GDN, _packed_decode, packed=8),
        form("gdn-steps", _SIGMOID, la_cases, _STEPS, _sglang_sigmoid),
        form("gdn-verify", _SIGMOID, la_cases, _STEPS, _sglang_sigmoid, update=False, lengths=(3, 2, 1, 0, 3, 4)),
        form("gdn-kept", _SIGMOID, la_cases, _KEPT, _sglang_drafts),
        form("gdn-tree", _SIGMOID, la_cases, _KEPT, _sglang_drafts, parents=I32),
        form("gdn-tree-rows", _SIGMOID, la_cases, _KEPT, _sglang_drafts, parents=I32, lengths=(), tokens=4),
        form("kda-tree", _SIGMOID, la_cases, _KEPT, _sglang_drafts, parents=I64, update=True, **_KDA),
        form("kda-steps", _SIGMOID, la_cases, _STEPS, _sglang_sigmoid, **_KDA),
        form("kda-bounded", _SIGMOID, la_cases, _STEPS, _sglang_sigmoid, gate="bounded", **_KDA),
        form("kda-packed", _PACKED_KDA, la_cases, _GDN, _packed_of_channels, packed=8, **_KDA),
        form("kda-packed-bounded", _PACKED_KDA, la_cases, _GDN, _packed_of_channels, packed=8, gate="bounded", **_KDA),
        form("norm-rows", "mixer2_rms_norm_gated", norm_cases, _ROWS, _row_norm),
        form("norm-heads", "rms_norm_gated", norm_cases, _HEADS, _head_norm),
        form("merge", "merge_state", combine_cases, _PAIR, _sglang_merge),
    ]


FORMS = [*_vllm(), *_sglang()]
# Functions whose padded rows may all be given slot 0, which SGLang keeps free for them.
SHARED = [f for f in FORMS if f.engine == "sglang" and f.id.endswith(("m2-bf16", "m1", "conv", "conv-triton", "packed", "steps"))]
assert len({f.id for f in FORMS}) == len(FORMS)


def padded_with(form: Form, device: str, slot: int) -> tuple[Any, Tensor, Tensor]:
    """(a call all of whose padded rows have this slot, which rows those are, the pool). Slot 0 is unused and zero."""
    call = replace(form, case=replace(form.case, pad_slot_id=0)).make(device)
    given = operands(call)
    index = next(given[n] for n in ("state_indices", "conv_state_indices") if n in given)
    pool = given["state"] if "state" in given else given["conv_state"]
    padded = (index <= 0) | (index >= pool.shape[0])
    index[padded] = slot
    pool[0] = 0
    call.memory.seal()
    return call, padded, pool
