"""gdn_layer: a gated delta rule layer's decode step between its projections, on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...calls.planning import Caller
from ...calls.public import Call, operator
from ...engine import layer_tokens
from . import gdn_tokens_call as several
from .gdn_spec import OPERATOR, GdnLayerProblem, GdnLayerSpec
from .planning import SCALARS, Options, family_of, result_and_scale, run_reference, views_of

SAID = 8  # of the options: the first so many
NAMES = (
    "mixed_qkv", "state", "conv_state", "conv_weight", "conv_bias", "a", "b", "A_log", "dt_bias", "z", "norm_weight", "out",
    "state_indices", "arrivals",
)  # fmt: skip


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
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Decode steps of a gated delta rule layer (Qwen3-Next, Qwen3.5), from what its in-projections give to what its out-projection takes.

    q, k, v <- silu(convolution of mixed_qkv); y, state <- gated_delta_rule(state, q, k, v, a, b) with a raw gate and a logit for beta;
    out = the gated RMS norm of y and z, of each head. HK key heads (of q and k) and HV heads of v and the state, a multiple of HK; K key
    channels and V value channels per head; channels = 2 HK K + HV V, in the order q, k, v. One kernel does all of it, or one behind it
    norms. The same bits as causal_conv1d_update with SiLU, gated_delta_rule and gated_rms_norm, one after the other, with y of out's
    dtype. Floating tensors may be f32, f16 or bf16, each its own, but for mixed_qkv and conv_state, which go together; arithmetic is f32.

    […] is [batch] for one token per sequence, or [batch, T] for several, T up to 8: all of them in one launch, with the bits of the three
    operators for T tokens (of gated_delta_rule with intermediate states). Packed sequences are those operators' only.

    mixed_qkv: […, channels]; a, b: […, HV]; views of the in-projections' outputs, with any strides
    z, out: […, HV V] or […, HV, V]; the channels of a head are dense
    conv_state: [slots, channels, width - 1 or width], updated in place, the newest input last; any strides
    state: [slots, HV, V, K], updated in place; its last three axes must be dense
    arrivals: [slots, HK] int32 of zeros, kept by the caller with the states: counts, within a launch, the blocks that have read a window
    conv_weight: [channels, width], width 2 … 8; conv_bias: [channels] or None
    A_log, dt_bias: [HV]; the log decay is -e^A_log softplus(a + dt_bias), without dt_bias where that is None
    norm_weight: [V], for all heads; None: no norm, and no z
    norm_before_gate: z gates what is normed already; norm_activation: "silu" or its other name "swish"; "sigmoid"
    allow_neg_eigval: beta is twice the sigmoid of b; use_qk_l2norm: q and k are divided by sqrt(|x|^2 + 1e-6) first
    scale, state_layout, state_indices, pad_slot_id: as in gated_delta_rule, of both states. A padded row gets a zero output
    update_state: False leaves window and state as they are
    intermediate_states: [rows, T or more, HV, V, K] (or K, V) of the state's dtype: receives the state after each token, and
    intermediate_conv_window: [rows, T or more, channels, width - 1] of mixed_qkv's dtype: the window after each token, in row
        intermediate_state_indices[b], [batch] int32 or int64, or b; a row that is not there is not written
    num_accepted_tokens: [batch] int32 or int64, with state_indices [batch, columns] and dst_state_indices [batch, T]: of the last call's
        tokens so many were accepted. The state is that of the slot in column num_accepted_tokens - 1, and the one after token t goes to
        slot dst_state_indices[b, t], if there is one. The window is that of the slot in the first column, of length width - 2 + T or more:
        its history begins at entry num_accepted_tokens - 1, and the new inputs are put behind it, at the front. A count that is no column,
        or whose history is not in the window, is padding, and so is a sequence without either slot
    pdl: whether the kernels may start while the ones ahead of them in the stream end; None = where the device can (sm_90 and later)

    Returns out (new, of mixed_qkv's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError listing every violated requirement, before anything is launched; UnsupportedError; CaptureError when a kernel
    would have to be built during a CUDA graph capture; NotBuiltError, CompileError, LoadError, LaunchError.
    Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    out, scale = result_and_scale(out, scale, mixed_qkv, state, state_layout)
    given = (
        mixed_qkv, state, conv_state, conv_weight, conv_bias, a, b, A_log, dt_bias, z, norm_weight, out, state_indices, arrivals,
    )  # fmt: skip
    options = Options(
        norm_eps, norm_before_gate, norm_activation, allow_neg_eigval, use_qk_l2norm, scale, state_layout, pad_slot_id, update_state
    )
    more = (dst_state_indices, num_accepted_tokens, intermediate_states, intermediate_conv_window, intermediate_state_indices)
    if layer_tokens.asked_for(mixed_qkv, update_state, *more):
        return Call(several.CALLER, (*given, *more), options, pdl)
    return Call(CALLER, given, options, pdl)


# torch.library: what torch.compile and opcheck see.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "gdn_layer(Tensor mixed_qkv, Tensor(a!) state, Tensor(b!) conv_state, Tensor conv_weight, Tensor? conv_bias, Tensor a, Tensor b, "
    "Tensor A_log, Tensor? dt_bias, Tensor? z, Tensor? norm_weight, Tensor(c!) out, Tensor? state_indices, Tensor(d!) arrivals, "
    "float eps, bool norm_before_gate, str activation, bool allow_neg_eigval, bool l2norm, float scale, str layout, int pad_slot_id, "
    "bool? pdl) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


def _dispatch(given: Sequence[Any], options: Options, pdl: bool | None) -> None:
    torch.ops.ssmgen.gdn_layer(*given, *options[:SAID], pdl)


def _received(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, bool | None]:
    """(given, options, pdl) of what torch's dispatcher gives."""
    return args[: len(NAMES)], Options(*args[len(NAMES) : -1]), args[-1]


@torch.library.impl(_library, "gdn_layer", "CUDA")
@torch.library.impl(_library, "gdn_layer", "CPU")
def _op(*args: Any) -> None:
    CALLER.plan(*_received(args))()


@torch.library.register_fake("ssmgen::gdn_layer", lib=_library)
def _fake(*args: Any) -> None:
    CALLER.foresee(*_received(args))


_required = frozenset(("mixed_qkv", "state", "conv_state", "conv_weight", "a", "b", "A_log", "out", "arrivals"))
FAMILY = family_of(OPERATOR, GdnLayerProblem, GdnLayerSpec)
CALLER = Caller(FAMILY, OPERATOR, NAMES, _required, views_of, run_reference, _dispatch, runtime.Patterns())
