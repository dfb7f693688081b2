"""chunk_delta_rule: the gated delta rule and DeltaNet over prompts, on torch tensors."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...calls.operator import operator, run
from ...calls.prompts import States
from ...engine.chunks.segments import SEGMENTS
from ...engine.recurrences.attention.switches import beta_objections, beta_of, gate_objections, scale_of
from .operands import OPERANDS
from .planning import CALLERS, Options
from .segments import workspace_for


@operator(like="v", segments=SEGMENTS)
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    linear_gate: bool = False,
    use_qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    state_layout: str = "vk",
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    checkpoint_positions: Tensor | None = None,
    checkpoints_out: Tensor | None = None,
    return_checkpoints: bool = False,
    segments: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Whole sequences of Gated DeltaNet, per token: S <- a S + beta (v - a S k) k^T, with a = e^g;  out = scale S q.

    HV heads of V value and K key channels, multiples of 16 up to 256; HK heads of q and k, of which each serves HV / HK of v. […] is
    [batch, T], or for packed sequences with cu_seqlens [tokens] or [1, tokens]. The states are those that `gated_delta_rule` goes on from.
    Products are of v's 16-bit dtype, summed in f32; decays, the inverse within a chunk of 64 tokens and the state between chunks are f32.
    The bits do not depend on the batch or on packing, and with segments=1 a sequence cut at multiples of 64 tokens, with f32 states,
    gives those of the whole. With v of f16, the state and what is added to it must stay within f16's range.

    q, k: […, HK, K], v, out: […, HV, V], bf16 or f16, all of one dtype
    g: […, HV], log decay, at most 0; with A_log [HV] the raw gate, of which the log decay is -e^A_log softplus(g + dt_bias), dt_bias [HV]
        or None; with linear_gate the decay a itself, 0 … 1
    beta: […, HV]; beta_sigmoid: it is a logit; allow_neg_eigval: twice its sigmoid
        g, beta, A_log and dt_bias are f32, bf16 or f16, each its own. Tokens and heads may have any distance; rows of q, k, v and out are
        contiguous, and begin at multiples of 4 bytes (fastest: of 16)
    use_qk_l2norm: q and k are divided by sqrt(|x|^2 + 1e-6) first
    scale: factor of the output; None for K^-0.5
    state_layout: "vk" for states [·, HV, V, K], "kv" for [·, HV, K, V]; never inferred
    cu_seqlens: [sequences + 1] int32 or int64 on the device, where each packed sequence starts. A sequence may have no tokens; tokens of no
        sequence get no output. States are then per sequence
    initial_states: [sequences, HV, V, K] f32, f16 or bf16, states before the first token; zeros if None
    return_final_states: also return the states after the last token, in final_states_out if that is given (which may be initial_states),
        else new ones of initial_states' dtype or f32
    state: [slots, HV, V, K], a pool in place of final states: receives the state after each sequence. Without initial_states it holds the
        one before it too, where has_initial_state, [sequences] bool, is true. A sequence without tokens leaves its slot alone
    state_indices: [sequences] int32 or int64, slot of each sequence; None for slot = sequence. Slots must be distinct
    pad_slot_id: a sequence whose slot is negative, equals it or is no slot of the pool gets a zero output and touches no state
    checkpoint_positions: [count] int32 or int64 on the device, ascending: after how many tokens the state is asked for too, 1 … tokens of
        the packed axis or of the flattened batch (b T + t). Each a multiple of 64 tokens behind its sequence's start, or its end
    checkpoints_out: [count, HV, V, K], receives those states, of the dtype of the others. A position of another kind, in no sequence (or in
        one whose slot is none) leaves its row alone
    return_checkpoints: also return them, in checkpoints_out if that is given, else new ones of the other states' dtype or f32
    segments: parts of a sequence behind its first one, of whole chunks of 64 tokens, that are computed side by side, 1 … 1024 at most; 1
        leaves it whole. None: as its own length, the heads of v and V say: whole where heads are many, or it is short. Three parts and
        more have other bits than one
    workspace: [bytes] uint8, what one kernel leaves for the next: chunk_delta_rule_workspace says how large, and it may be used again as
        soon as the call is enqueued on the same stream; None for a new one
    out: None for a new one, dense
    pdl: whether the first of its kernels may start while the one ahead of it in the stream ends; None = where the device can (sm_90 and
        later)

    Returns out, or out and what else was asked for: (out[, final states][, checkpoints]). CPU tensors run the reference implementation,
    token by token.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError for what no kernel serves;
    CaptureError when a kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    gate = "linear" if linear_gate else "log" if A_log is None else "raw"
    objections = gate_objections(A_log, dt_bias)
    if linear_gate and not (A_log is None and dt_bias is None):
        objections = ("linear_gate says that g is the decay itself, and A_log and dt_bias make a raw gate a log decay",)
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, checkpoint_positions,
        checkpoints_out, return_checkpoints, out, workspace,
    )  # fmt: skip
    how = Options(gate, beta_of(beta_sigmoid, allow_neg_eigval), use_qk_l2norm, scale_of(scale, q), state_layout, pad_slot_id, segments)
    objections += beta_objections(beta_sigmoid, allow_neg_eigval)
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    return _call("chunk_gated_delta_rule", tokens, states, how, pdl, objections)


@operator(like="v", segments=SEGMENTS)
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    state_layout: str = "vk",
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    checkpoint_positions: Tensor | None = None,
    checkpoints_out: Tensor | None = None,
    return_checkpoints: bool = False,
    segments: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Whole sequences of DeltaNet, per token: S <- S + beta (v - S k) k^T;  out = scale S q.

    The states are those that `delta_rule` goes on from. Everything else as chunk_gated_delta_rule.
    Source: Yang et al. 2024 (arXiv 2406.06484).
    """
    states = States(
        cu_seqlens, initial_states, return_final_states, final_states_out, state, state_indices, has_initial_state, checkpoint_positions,
        checkpoints_out, return_checkpoints, out, workspace,
    )  # fmt: skip
    how = Options("none", beta_of(beta_sigmoid, allow_neg_eigval), use_qk_l2norm, scale_of(scale, q), state_layout, pad_slot_id, segments)
    objections = beta_objections(beta_sigmoid, allow_neg_eigval)
    return _call("chunk_delta_rule", {"q": q, "k": k, "v": v, "beta": beta}, states, how, pdl, objections)


def chunk_delta_rule_workspace(
    tokens: int, sequences: int, heads: int, head_k: int = 128, head_v: int = 128, segments: int | None = None
) -> int:
    """Bytes of a workspace for so many tokens in all (batch times T), sequences and heads of v: also for fewer tokens or sequences.

    segments: as of the call. Where a sequence may be cut into segments, their states take 4 K (V + K) bytes each and head.
    """
    return workspace_for(tokens, sequences, heads, head_k, head_v, segments, tokens)


def _call(
    name: str, tokens: dict[str, Tensor | None], states: States, options: Options, pdl: bool | None, objections: tuple[str, ...]
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """The result of a function, with tensors made for what it writes and was not given; the checks object to the rest."""
    bytes_of = partial(workspace_for, segments=options.segments)
    behind = states.operands(tokens["v"], tokens["q"], options.state_layout, bytes_of)
    tensors = OPERANDS.Tensors(**tokens, **behind)
    return run(CALLERS[name], tensors, options, pdl, returns=states.returns(behind), objections=objections + states.objections)
