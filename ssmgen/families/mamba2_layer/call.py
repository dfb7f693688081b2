"""mamba2_layer: a Mamba-2 layer's decode step between its projections, on torch tensors."""

from __future__ import annotations

from torch import Tensor

from ...calls.operator import operator, run
from ...calls.scalars import NOT_NEGATIVE, integer
from ...engine.noise import seeded
from .operands import OPERANDS
from .planning import CALLER, Options


@operator(like="xBC", norm_eps=NOT_NEGATIVE, norm_group_size=integer("a positive integer", 1))
def mamba2_layer(
    xBC: Tensor,
    dt: Tensor,
    z: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    arrivals: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    norm_eps: float = 1e-5,
    norm_group_size: int | None = None,
    norm_before_gate: bool = False,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] | None = None,
    A_is_log: bool = False,
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
    """Decode steps of a Mamba-2 layer, from its in-projection's output to its out-projection's input.

    x, B, C <- silu(convolution of xBC); state <- exp(dt A) state + dt x B; y = C state + D x; out = the gated RMS norm of y and z.

    H heads of P rows (headdim), N = d_state, G groups of heads that share B and C; channels = H P + 2 G N, in the order x, B, C. […] is
    [batch] for one token per sequence, or [batch, T] for several, T up to 8.

    xBC: […, channels]; dt: […, H]; z, out: […, H P]: views of the in-projection's output, with any strides
    conv_state: [slots, channels, width - 1 or width], updated in place, the newest input last; any strides
    state: [slots, H, P, N], updated in place; its last three axes must be dense
    arrivals: [slots, G] int32 of zeros, kept by the caller with the states: counts the blocks that have read a window within a launch
    conv_weight: [channels, width], width 2 … 8; conv_bias: [channels] or None
    A: [H], negative, or with A_is_log the logarithm log(-A) that checkpoints hold; D: [H] or [H, P]; dt_bias: [H]
    norm_weight: [H P], or [norm_group_size] for all groups; None: no norm, and y is multiplied by silu(z), if there is a z
    norm_group_size: channels that are normed together, None for all of a row; norm_before_gate: z gates after the norm
    dt_softplus, dt_limit, state_indices, pad_slot_id: as in selective_state_update, of both states. A padded row gets a zero output
    pdl: whether each kernel may start while the previous one in the stream ends; None = if the device can (sm_90 and later)

    Stochastic rounding:
    rand_seed, philox_rounds: as in selective_state_update

    Several tokens:

    Only the three separate operators take packed sequences and draft trees.

    update_state: False leaves window and state unchanged
    intermediate_states: [rows, T or more, H, P, N], of f32, f16 or bf16: receives the state after each token, in row
        intermediate_state_indices[b], [batch] int32 or int64, or b; a row out of range is not written
    intermediate_conv_window: [rows, T or more, channels, width - 1] of xBC's dtype: receives the window after each token, in the same rows
    num_accepted_tokens: [batch] int32 or int64, with state_indices [batch, columns] and dst_state_indices [batch, T]: number of
        the last call's tokens that were accepted. The slot in column num_accepted_tokens - 1 holds the state. The state after token t goes
        to slot dst_state_indices[b, t], if there is one. The slot in the first column holds the window, of length width - 2 + T or more.
        Its history begins at entry num_accepted_tokens - 1; the step moves the history to the front and stores the new inputs after it. A
        sequence is padding if its count names no column, if the history is not in the window, or if either slot is missing

    Types and precision:

    One kernel convolves and updates the states, and a second one norms. For one token or several, the result is bitwise equal to
    causal_conv1d_update with SiLU, selective_state_update and gated_rms_norm, one after the other. Floating tensors may be f32, f16 or
    bf16, each with its own dtype; xBC and conv_state have the same dtype. Arithmetic is f32.

    Returns out (new, of xBC's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError, UnsupportedError, CaptureError, NotBuiltError, CompileError, LoadError, LaunchError as selective_state_update.
    Source: Dao & Gu 2024 (arXiv 2405.21060); the norm: state-spaces/mamba.
    """
    if out is None and isinstance(state, Tensor) and isinstance(xBC, Tensor):
        out = xBC.new_empty((*xBC.shape[:-1], *([state.shape[1] * state.shape[2]] if state.dim() == 4 else [])))
    rand_seed, philox_rounds = seeded(rand_seed, philox_rounds)
    tensors = OPERANDS.Tensors(
        state=state, conv_state=conv_state, xBC=xBC, conv_weight=conv_weight, conv_bias=conv_bias,
        intermediate_conv_window=intermediate_conv_window, dt=dt, A=A, D=D, z=z, dt_bias=dt_bias, norm_weight=norm_weight, out=out,
        state_indices=state_indices, dst_state_indices=dst_state_indices, num_accepted_tokens=num_accepted_tokens,
        intermediate_states=intermediate_states, intermediate_state_indices=intermediate_state_indices, rand_seed=rand_seed,
        arrivals=arrivals,
    )  # fmt: skip
    said = (norm_eps, norm_group_size, norm_before_gate, dt_softplus, dt_limit, A_is_log, pad_slot_id, philox_rounds, update_state)
    return run(CALLER, tensors, Options(*said), pdl)
