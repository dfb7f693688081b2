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
from .spec import workspace_for


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

    HV heads of V value and K key channels, multiples of 16 up to 256; HK heads of q and k, each for HV / HK heads of v. […] is [batch, T],
    or for packed sequences with cu_seqlens [tokens] or [1, tokens]. `gated_delta_rule` continues from these states.

    q, k: […, HK, K]          v, out: […, HV, V]; bf16 or f16, all of one dtype
    g: […, HV] f32, bf16 or f16, log decay, at most 0
    beta: […, HV] f32, bf16 or f16
    use_qk_l2norm: q and k are first divided by sqrt(|x|^2 + 1e-6)
    scale: factor of the output; None for K^-0.5
    state_layout: "vk" for states [·, HV, V, K], "kv" for [·, HV, K, V]; never inferred
    cu_seqlens: [sequences + 1] int32 or int64 on the device, start of each packed sequence. A sequence may have no tokens; tokens outside
        all sequences get no output. States are then per sequence
    initial_states: [sequences, HV, V, K] f32, f16 or bf16, states before the first token; zeros if None
    return_final_states: also return the states after the last token, in final_states_out if that is given (which may be initial_states),
        else new ones of initial_states' dtype or f32
    out: None for a new one, dense

    Raw gates:
    A_log, dt_bias: [HV] f32, bf16 or f16: g is then the raw gate, whose log decay is -e^A_log softplus(g + dt_bias); dt_bias may be None
    linear_gate: g is the decay a itself, 0 … 1
    beta_sigmoid: beta is a logit; allow_neg_eigval: uses twice its sigmoid

    States in a pool:
    state: [slots, HV, V, K], a pool instead of final states: receives the state after each sequence. Without initial_states it also
        holds the state before it, if has_initial_state, [sequences] bool, is true. A sequence without tokens leaves its slot unchanged
    state_indices: [sequences] int32 or int64, slot of each sequence; None for slot = sequence. Slots must be distinct
    pad_slot_id: a sequence whose slot is negative, equals this or is not in the pool gets a zero output and touches no state

    States at positions, for prefix caches:
    checkpoint_positions: [count] int32 or int64 on the device, ascending: token counts after which the state is also wanted, 1 … tokens of
        the packed axis or of the flattened batch (b T + t). Each is a multiple of 64 tokens after its sequence's start, or its end
    checkpoints_out: [count, HV, V, K], receives these states, of the dtype of the other states. Any other position, or a position outside
        all sequences or in a sequence without a valid slot, leaves its row unchanged
    return_checkpoints: also return these states, in checkpoints_out if that is given, else new ones of the other states' dtype or f32

    Launch, memory and segments:
    segments: most parts of a sequence after its first one, of whole chunks of 64 tokens, that are computed in parallel, 1 … 1024; 1 leaves
        the sequence whole. None: the sequence's length, the heads of v and V decide, whole if there are many heads or the sequence is
        short. Three or more parts change bits compared to one
    workspace: [bytes] uint8, data from one kernel to the next: chunk_delta_rule_workspace returns its size. It may be used again as soon
        as the call is enqueued on the same stream; None for a new one
    pdl: whether the first of its kernels may start while the previous one in the stream ends; None = if the device can (sm_90 and
        later)

    Types and precision:

    Tokens and heads may have any stride; rows of q, k, v and out are contiguous, and begin at multiples of 4 bytes (fastest: of 16).
    Products are of v's 16-bit dtype, summed in f32; decays, the inverse within a chunk of 64 tokens and the state between chunks are f32.
    The bits do not depend on the batch or on packing. With segments=1 and f32 states, a sequence cut at multiples of 64 tokens gives the
    same bits as the whole sequence. With v of f16, the state and the additions to it must stay within f16's range.

    Returns out, or out and the requested states: (out[, final states][, checkpoints]). CPU tensors run the reference implementation,
    token by token.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError if no kernel serves the call;
    CaptureError when a kernel would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    gate = "linear" if linear_gate else "log" if A_log is None else "raw"
    objections = gate_objections(A_log, dt_bias)
    if linear_gate and not (A_log is None and dt_bias is None):
        objections = (
            "linear_gate=True is given with A_log or dt_bias; expected either: linear_gate takes g as the decay, A_log makes a "
            "log decay of it",
        )
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

    `delta_rule` continues from these states. All other arguments as in chunk_gated_delta_rule.
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
    """Bytes of a workspace for calls of up to `tokens` tokens in all (batch times T), up to `sequences` sequences, and `heads` heads of v.

    segments: as in the call. If a sequence may be cut into segments, each segment's state takes 4 K (V + K) bytes per head.
    """
    return workspace_for(tokens, sequences, heads, head_k, head_v, segments, tokens)


def _call(
    name: str, tokens: dict[str, Tensor | None], states: States, options: Options, pdl: bool | None, objections: tuple[str, ...]
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """The result of a function. Allocates missing outputs; the checks reject the other errors."""
    bytes_of = partial(workspace_for, segments=options.segments)
    behind = states.operands(tokens["v"], tokens["q"], options.state_layout, bytes_of)
    tensors = OPERANDS.Tensors(**tokens, **behind)
    return run(CALLERS[name], tensors, options, pdl, returns=states.returns(behind), objections=objections + states.objections)
