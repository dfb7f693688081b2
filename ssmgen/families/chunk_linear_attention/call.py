"""chunk_linear_attention: KDA, GLA, GDN-2, Comba, RWKV-7 and DPLR over prompts, on torch tensors."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...calls import checks
from ...calls.operator import Before, operator, run
from ...calls.prompts import States
from ...engine.chunks.segments import SEGMENTS
from ...engine.recurrences.attention.switches import beta_objections, beta_of, gate_objections, gate_of, scale_of
from ...errors import ArgumentError
from .operands import GATED, OPERANDS
from .planning import CALLERS, WHAT, Options
from .problem import OPERATOR, Rule
from .spec import workspace_for


@operator(like="v", segments=SEGMENTS)
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    lower_bound: float | None = None, use_qk_l2norm: bool = False, beta_sigmoid: bool = False, allow_neg_eigval: bool = False,
    scale: float | None = None, state_layout: str = "vk", cu_seqlens: Tensor | None = None, initial_states: Tensor | None = None,
    return_final_states: bool = False, final_states_out: Tensor | None = None, state: Tensor | None = None,
    state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, pad_slot_id: int = -1,
    checkpoint_positions: Tensor | None = None, checkpoints_out: Tensor | None = None, return_checkpoints: bool = False,
    segments: int | None = None, workspace: Tensor | None = None, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Whole sequences of Kimi delta attention, per token: S <- S D + beta (v - S D k) k^T, with D = diag(e^g);  out = scale S q.

    g: […, HV, K] f32, bf16 or f16, log decay of each key channel, at most 0
    beta: […, HV] f32, bf16 or f16. A beta per value channel is refused; `kda` takes it

    Raw gates:
    A_log: [HV] f32, bf16 or f16: g is then the raw gate, whose log decay is -e^A_log softplus(g + dt_bias)
    lower_bound: the log decay is lower_bound sigmoid(e^A_log (g + dt_bias)) instead, where A_log may be missing
    dt_bias: [HV, K] or [HV K], or None
    beta_sigmoid: beta is a logit; allow_neg_eigval: uses twice its sigmoid

    Memory:
    workspace: as in chunk_gated_delta_rule; chunk_linear_attention_workspace returns its size

    All other arguments, types, precision, returns and errors as in chunk_gated_delta_rule; `kda` continues from these states.
    Source: Kimi Team 2025 (arXiv 2510.26692).
    """
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, checkpoint_positions,
        checkpoints_out, return_checkpoints, out, workspace,
    )  # fmt: skip
    gate, beta_form = gate_of(A_log, lower_bound), beta_of(beta_sigmoid, allow_neg_eigval)
    how = Options("delta", gate, beta_form, use_qk_l2norm, scale_of(scale, q), lower_bound or 0.0, state_layout, pad_slot_id, segments)
    objections = gate_objections(A_log, dt_bias, lower_bound) + beta_objections(beta_sigmoid, allow_neg_eigval)
    tokens = {"q": q, "k": k, "v": v, "gk": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    return _call("chunk_kda", tokens, states, how, pdl, objections)


@operator(like="v")
def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, *,
    scale: float | None = None, state_layout: str = "vk", cu_seqlens: Tensor | None = None, initial_states: Tensor | None = None,
    return_final_states: bool = False, final_states_out: Tensor | None = None, state: Tensor | None = None,
    state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, pad_slot_id: int = -1,
    checkpoint_positions: Tensor | None = None, checkpoints_out: Tensor | None = None, return_checkpoints: bool = False,
    workspace: Tensor | None = None, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Whole sequences of gated linear attention, per token: S <- S D + v k^T, with D = diag(e^gk);  out = scale S q.

    gk: […, HV, K], log decay of each key channel, at most 0; None for none
    gv: refused: a decay per value channel, which `gla` takes, has no form in chunks

    All other arguments as in chunk_gated_delta_rule, except that no sequence is cut into segments; `gla` continues from these states.
    Source: Yang et al. 2023 (arXiv 2312.06635).
    """
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, checkpoint_positions,
        checkpoints_out, return_checkpoints, out, workspace,
    )  # fmt: skip
    objections = () if gv is None else (_GV,)
    how = Options("plain", scale=scale_of(scale, q), state_layout=state_layout, pad_slot_id=pad_slot_id)
    return _call("chunk_gla", {"q": q, "k": k, "v": v, "gk": gk}, states, how, pdl, objections)


@operator(like="v", segments=SEGMENTS)
def chunk_gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    lower_bound: float | None = None, use_qk_l2norm: bool = False,
    scale: float | None = None, state_layout: str = "vk", cu_seqlens: Tensor | None = None, initial_states: Tensor | None = None,
    return_final_states: bool = False, final_states_out: Tensor | None = None, state: Tensor | None = None,
    state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, pad_slot_id: int = -1,
    checkpoint_positions: Tensor | None = None, checkpoints_out: Tensor | None = None, return_checkpoints: bool = False,
    segments: int | None = None, workspace: Tensor | None = None, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Whole sequences of Gated DeltaNet 2, per token: S <- S D + (w v - S D (b k)) k^T, with D = diag(e^g);  out = scale S q.

    g, A_log, dt_bias, lower_bound: as in chunk_kda
    b: […, HV, K] f32, bf16 or f16, the erase gate, applied to k after its norm
    w: […, HV, V] f32, bf16 or f16, the write gate. torch multiplies it with v, and rounds to v's dtype, before the two kernels: this costs
        a third kernel, and a new tensor of v's size, in every call

    All other arguments as in chunk_gated_delta_rule; `gdn2` continues from these states. Source: flash-linear-attention, fla.ops.gdn2.
    """
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, checkpoint_positions,
        checkpoints_out, return_checkpoints, out, workspace,
    )  # fmt: skip
    gate = gate_of(A_log, lower_bound)
    how = Options("delta", gate, "plain", use_qk_l2norm, scale_of(scale, q), lower_bound or 0.0, state_layout, pad_slot_id, segments)
    product, wrong = _product(v, w)
    tokens = {"q": q, "k": k, "v": product, "gk": g, "erase": b, "A_log": A_log, "dt_bias": dt_bias}
    before = None if wrong else Before(torch.mul, (v, w), product)
    return _call("chunk_gdn2", tokens, states, how, pdl, wrong + gate_objections(A_log, dt_bias, lower_bound), before)


@operator(like="v", segments=SEGMENTS)
def chunk_comba(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    use_qk_l2norm: bool = False, beta_sigmoid: bool = False,
    scale: float | None = None, state_layout: str = "vk", cu_seqlens: Tensor | None = None, initial_states: Tensor | None = None,
    return_final_states: bool = False, final_states_out: Tensor | None = None, state: Tensor | None = None,
    state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, pad_slot_id: int = -1,
    checkpoint_positions: Tensor | None = None, checkpoints_out: Tensor | None = None, return_checkpoints: bool = False,
    segments: int | None = None, workspace: Tensor | None = None, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Whole sequences of Comba, per token: S <- a S + beta (v - S p) k^T, with a = e^g;  out = scale S q.

    p: […, HK, K], of v's dtype, the key that reads the state; use_qk_l2norm normalises it too
    g: […, HV], log decay, at most 0; with A_log [HV] the raw gate, whose log decay is -e^A_log softplus(g + dt_bias), dt_bias [HV] or None

    All other arguments as in chunk_gated_delta_rule; `comba` continues from these states.
    Source: Hu et al. 2025 (arXiv 2506.02475), as fla's fused kernel does.
    """
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, checkpoint_positions,
        checkpoints_out, return_checkpoints, out, workspace,
    )  # fmt: skip
    how = Options(
        "old", gate_of(A_log, None), beta_of(beta_sigmoid), use_qk_l2norm, scale_of(scale, q), 0.0, state_layout, pad_slot_id, segments
    )
    tokens = {"q": q, "k": k, "v": v, "read": p, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    return _call("chunk_comba", tokens, states, how, pdl, gate_objections(A_log, dt_bias))


@operator(like="v")
def chunk_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, *,
    scale: float | None = 1.0, state_layout: str = "vk", cu_seqlens: Tensor | None = None, initial_states: Tensor | None = None,
    return_final_states: bool = False, final_states_out: Tensor | None = None, state: Tensor | None = None,
    state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, pad_slot_id: int = -1,
    checkpoint_positions: Tensor | None = None, checkpoints_out: Tensor | None = None, return_checkpoints: bool = False,
    workspace: Tensor | None = None, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Whole sequences of RWKV-7, per token: S <- S D - (S kk) (kk a)^T + v k^T, with D = diag(e^w);  out = S r, with scale 1 unless given.

    r, k, kk: […, HK, K], of v's dtype; a: […, HK, K] and w: […, HV, K], f32, bf16 or f16, each with its own dtype; w: log decay, at most 0

    All other arguments as in chunk_gated_delta_rule, except that a chunk has 32 tokens: checkpoints and cuts are at multiples of 32. No
    sequence is cut into segments. `rwkv7` continues from these states. Source: Peng et al. 2025 (arXiv 2503.14456).
    """
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, checkpoint_positions,
        checkpoints_out, return_checkpoints, out, workspace,
    )  # fmt: skip
    how = Options("low_rank", scale=scale_of(scale, r), state_layout=state_layout, pad_slot_id=pad_slot_id)
    return _call("chunk_rwkv7", {"q": r, "gk": w, "k": k, "v": v, "read": kk, "alpha": a}, states, how, pdl)


@operator(like="v")
def chunk_dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor | None = None, *,
    scale: float | None = None, state_layout: str = "vk", cu_seqlens: Tensor | None = None, initial_states: Tensor | None = None,
    return_final_states: bool = False, final_states_out: Tensor | None = None, state: Tensor | None = None,
    state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, pad_slot_id: int = -1,
    checkpoint_positions: Tensor | None = None, checkpoints_out: Tensor | None = None, return_checkpoints: bool = False,
    workspace: Tensor | None = None, out: Tensor | None = None, pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Whole sequences of the rule diagonal plus low rank, per token: S <- S D + (S a) b^T + v k^T, with D = diag(e^gk);  out = scale S q.

    q, k, a, b: […, HK, K], of v's dtype; gk: […, HV, K] f32, bf16 or f16, log decay, at most 0, or None for none

    All other arguments as in chunk_rwkv7, except the scale, which is as in chunk_gated_delta_rule.
    `dplr_delta_rule` continues from these states. Source: flash-linear-attention, fla.ops.generalized_delta_rule.
    """
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, checkpoint_positions,
        checkpoints_out, return_checkpoints, out, workspace,
    )  # fmt: skip
    how = Options("low_rank", scale=scale_of(scale, q), state_layout=state_layout, pad_slot_id=pad_slot_id)
    tokens = {"q": q, "k": k, "v": v, "read": a, "write": b, "gk": gk}
    return _call("chunk_dplr_delta_rule", tokens, states, how, pdl)


def chunk_linear_attention_workspace(
    tokens: int, sequences: int, heads: int, head_k: int, rule: str = "delta", head_v: int = 128, segments: int | None = None
) -> int:
    """Bytes of a workspace for these numbers of tokens in all (batch times T), sequences, heads of v and key channels: also for fewer of
    the first three.

    rule: "delta" for chunk_kda and chunk_gdn2, "plain" for chunk_gla, "old" for chunk_comba, "low_rank" for chunk_rwkv7 and
        chunk_dplr_delta_rule. Raises ArgumentError for another one.
    head_v, segments: value channels, and segments as in the call. If a sequence may be cut into segments, each segment's state takes
        4 K (V + K) bytes per head.
    """
    rules = [kind.value for kind in Rule]
    if rule not in rules:
        raise ArgumentError(f"{OPERATOR}_workspace", [f"rule is {rule!r}; expected one of {', '.join(rules)}"])
    return workspace_for(tokens, sequences, heads, head_k, head_v, Rule(rule), segments, tokens)


_GV = (
    "gv, a log decay per value channel, is given; expected None: its products over tokens would differ for every value channel. "
    "Call gla, which takes it token by token."
)


def _product(v: Tensor, w: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """(memory for v times w, reasons why this product is impossible)"""
    problems: list[str] = []
    given = {"v": v, "w": w}
    if not checks.check_tensors(given, problems):
        return v, tuple(p for p in problems if p.startswith("w "))  # the call itself checks v
    checks.check_types(GATED, given, "v", problems, WHAT)
    checks.check_shape("w", w, {"[…, HV, V]": tuple(v.shape)}, problems)
    return (v, tuple(p for p in problems if p.startswith("w "))) if problems else (torch.empty_like(v, memory_format=_DENSE), ())


_DENSE = torch.contiguous_format


def _call(
    name: str,
    tokens: dict[str, Tensor | None],
    states: States,
    options: Options,
    pdl: bool | None,
    objections: tuple[str, ...] = (),
    before: Before | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """The result of a function, from its operands by their roles. Allocates missing outputs."""
    bytes_of = partial(workspace_for, rule=Rule(options.rule), segments=options.segments)
    behind = states.operands(tokens["v"], tokens["q"], options.state_layout, bytes_of)
    tensors = OPERANDS.Tensors(**tokens, **behind)
    objections += states.objections
    return run(CALLERS[name], tensors, options, pdl, returns=states.returns(behind), objections=objections, before=before)
