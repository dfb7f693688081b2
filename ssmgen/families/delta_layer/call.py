"""gdn_layer, kda_layer: a delta rule layer's decode step between its projections, on torch tensors."""

from __future__ import annotations

from torch import Tensor

from ...calls.operator import operator, run
from ...calls.scalars import POSITIVE
from ...engine.noise import seeded
from ...engine.norm_calls import ACTIVATION
from .operands import FUNCTIONS
from .planning import CALLERS, Options

SCALARS = {"norm_eps": POSITIVE, "norm_activation": ACTIVATION}


@operator(like="mixed_qkv", **SCALARS)
def gdn_layer(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    z: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    arrivals: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor | None,
    norm_weight: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    norm_before_gate: bool = True,
    norm_activation: str = "silu",
    allow_neg_eigval: bool = False,
    use_qk_l2norm: bool = True,
    scale: float | None = None,
    state_layout: str = "vk",
    state_indices: Tensor | None = None,
    dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    update_state: bool = True,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Decode steps of a gated delta rule layer (Qwen3-Next, Qwen3.5), from its in-projections' outputs to its out-projection's input.

    q, k, v <- silu(convolution of mixed_qkv); y, state <- gated_delta_rule(state, q, k, v, a, b) with a raw gate and a logit for beta; out
    = the gated RMS norm of y and z, of each head.

    HK key heads (of q and k) and HV heads of v and the state, a multiple of HK; K key channels and V value channels per head; channels = 2
    HK K + HV V, in the order q, k, v. […] is [batch] for one token per sequence, or [batch, T] for several, T up to 8.

    mixed_qkv: […, channels]; a, b: […, HV]; views of the in-projections' outputs, with any strides
    z, out: […, HV V] or […, HV, V]; the channels of a head are dense
    conv_state: [slots, channels, width - 1 or width], updated in place, the newest input last; any strides
    state: [slots, HV, V, K], updated in place; its last three axes must be dense
    arrivals: [slots, HK] int32 of zeros, kept by the caller with the states: counts the blocks that have read a window within a launch
    conv_weight: [channels, width], width 2 … 8; conv_bias: [channels] or None
    A_log, dt_bias: [HV]; the log decay is -e^A_log softplus(a + dt_bias), without dt_bias if that is None
    norm_weight: [V], for all heads; None: no norm, and no z
    norm_before_gate: z gates after the norm; norm_activation: "silu" or its other name "swish"; "sigmoid"
    allow_neg_eigval: beta is twice the sigmoid of b; use_qk_l2norm: q and k are first divided by sqrt(|x|^2 + 1e-6)
    scale, state_layout, state_indices, pad_slot_id: as in gated_delta_rule, of both states. A padded row gets a zero output
    pdl: whether each kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Stochastic rounding:
    rand_seed, philox_rounds: as in gated_delta_rule

    Several tokens:

    Only the three separate operators take packed sequences.

    update_state: False leaves window and state unchanged
    intermediate_states: [rows, T or more, HV, V, K] (or K, V) of the state's dtype: receives the state after each token, in row
        intermediate_state_indices[b], [batch] int32 or int64, or b; a row out of range is not written
    intermediate_conv_window: [rows, T or more, channels, width - 1] of mixed_qkv's dtype: receives the window after each token, in the same
        rows
    num_accepted_tokens: [batch] int32 or int64, with state_indices [batch, columns] and dst_state_indices [batch, T]: number of
        the last call's tokens that were accepted. The slot in column num_accepted_tokens - 1 holds the state. The state after token t goes
        to slot dst_state_indices[b, t], if there is one. The slot in the first column holds the window, of length width - 2 + T or more.
        Its history begins at entry num_accepted_tokens - 1; the step moves the history to the front and stores the new inputs after it. A
        sequence is padding if its count names no column, if the history is not in the window, or if either slot is missing

    Types and precision:

    One kernel does everything, or a second kernel norms. For one token or several, the result is bitwise equal to causal_conv1d_update with
    SiLU, gated_delta_rule (with intermediate states) and gated_rms_norm, one after the other, with y of out's dtype. Floating tensors may
    be f32, f16 or bf16, each with its own dtype; mixed_qkv and conv_state have the same dtype. Arithmetic is f32.

    Returns out (new, of mixed_qkv's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a kernel
    would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    out, scale = _result_and_scale(out, scale, mixed_qkv, state, state_layout)
    rand_seed, philox_rounds = seeded(rand_seed, philox_rounds)
    tensors = FUNCTIONS["gdn_layer"].Tensors(
        state=state, conv_state=conv_state, mixed_qkv=mixed_qkv, conv_weight=conv_weight, conv_bias=conv_bias,
        intermediate_conv_window=intermediate_conv_window, a=a, b=b, A_log=A_log, dt_bias=dt_bias, z=z, norm_weight=norm_weight,
        out=out, state_indices=state_indices, dst_state_indices=dst_state_indices, num_accepted_tokens=num_accepted_tokens,
        intermediate_states=intermediate_states, intermediate_state_indices=intermediate_state_indices, rand_seed=rand_seed,
        arrivals=arrivals,
    )  # fmt: skip
    norm = (norm_eps, norm_before_gate, norm_activation)
    options = Options(*norm, allow_neg_eigval, use_qk_l2norm, scale, state_layout, pad_slot_id, update_state, None, philox_rounds)
    return run(CALLERS["gdn_layer"], tensors, options, pdl)


@operator(like="mixed_qkv", **SCALARS)
def kda_layer(
    mixed_qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    z: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    arrivals: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    norm_eps: float = 1e-5,
    norm_before_gate: bool = True,
    norm_activation: str = "sigmoid",
    allow_neg_eigval: bool = False,
    use_qk_l2norm: bool = True,
    scale: float | None = None,
    state_layout: str = "vk",
    state_indices: Tensor | None = None,
    dst_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    update_state: bool = True,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Decode steps of a Kimi delta attention layer (Kimi-Linear), from its in-projections' outputs to its out-projection's input.

    q, k, v <- silu(convolution of mixed_qkv); y, state <- kda(state, q, k, v, g, beta) with a raw gate and a logit for beta;
    out = the gated RMS norm of y and z, of each head. HK key heads (of q and k) and HV heads of v and the state, a multiple of HK; K key
    channels and V value channels per head; channels = 2 HK K + HV V, in the order q, k, v: an engine with a projection, a convolution and
    a window for each of q, k and v lays them out next to each other. One kernel does everything, or a second kernel norms. The result is
    bitwise equal to causal_conv1d_update with SiLU, kda and gated_rms_norm, one after the other, with y of out's dtype. Floating tensors
    may be f32, f16 or bf16, each with its own dtype; mixed_qkv and conv_state have the same dtype. Arithmetic is f32.

    […] is [batch] for one token per sequence, or [batch, T] for several, as in gdn_layer.

    mixed_qkv: […, channels]; g: […, HV K] or […, HV, K]; beta: […, HV]; views of the in-projections' outputs, with any strides
    A_log: [HV]; dt_bias: [HV K] or [HV, K] or None; the log decay is -e^A_log softplus(g + dt_bias), or with lower_bound
        lower_bound sigmoid(e^A_log (g + dt_bias)), where A_log may be None
    norm_activation: "sigmoid"; "silu" or its other name "swish"
    All other arguments, returns and errors: as in gdn_layer. CPU tensors run the reference implementation.
    Source: Kimi Team 2025 (arXiv 2510.26692).
    """
    out, scale = _result_and_scale(out, scale, mixed_qkv, state, state_layout)
    rand_seed, philox_rounds = seeded(rand_seed, philox_rounds)
    tensors = FUNCTIONS["kda_layer"].Tensors(
        state=state, conv_state=conv_state, mixed_qkv=mixed_qkv, conv_weight=conv_weight, conv_bias=conv_bias,
        intermediate_conv_window=intermediate_conv_window, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, z=z, norm_weight=norm_weight,
        out=out, state_indices=state_indices, dst_state_indices=dst_state_indices, num_accepted_tokens=num_accepted_tokens,
        intermediate_states=intermediate_states, intermediate_state_indices=intermediate_state_indices, rand_seed=rand_seed,
        arrivals=arrivals,
    )  # fmt: skip
    norm = (norm_eps, norm_before_gate, norm_activation)
    options = Options(*norm, allow_neg_eigval, use_qk_l2norm, scale, state_layout, pad_slot_id, update_state, lower_bound, philox_rounds)
    return run(CALLERS["kda_layer"], tensors, options, pdl)


def _result_and_scale(
    out: Tensor | None, scale: float | None, mixed_qkv: Tensor, state: Tensor, state_layout: str
) -> tuple[Tensor | None, float]:
    """Defaults of a call: a new output of the input's dtype, and scale K^-0.5. The operands are not checked yet."""
    headed = isinstance(state, Tensor) and state.dim() == 4
    keys, values = (2, 3) if state_layout == "kv" else (3, 2)
    if out is None and isinstance(mixed_qkv, Tensor):
        out = mixed_qkv.new_empty((*mixed_qkv.shape[:-1], *([state.shape[1] * state.shape[values]] if headed else [])))
    if scale is None:
        scale = state.shape[keys] ** -0.5 if headed and state.shape[keys] else 1.0
    return out, scale
