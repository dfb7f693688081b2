"""kda_layer: a Kimi delta attention layer's decode step between its projections, on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...calls.planning import Caller
from ...calls.public import Call, operator
from ...engine import layer_tokens
from . import kda_tokens_call as several
from .kda_spec import OPERATOR, KdaLayerProblem, KdaLayerSpec
from .planning import SCALARS, Options, family_of, result_and_scale, run_reference, views_of

SAID = 8  # of the options: the first so many, and the lower bound
NAMES = (
    "mixed_qkv", "state", "conv_state", "conv_weight", "conv_bias", "g", "beta", "A_log", "dt_bias", "z", "norm_weight", "out",
    "state_indices", "arrivals",
)  # fmt: skip


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
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """Decode steps of a Kimi delta attention layer (Kimi-Linear), from what its in-projections give to what its out-projection takes.

    q, k, v <- silu(convolution of mixed_qkv); y, state <- kda(state, q, k, v, g, beta) with a raw gate and a logit for beta;
    out = the gated RMS norm of y and z, of each head. HK key heads (of q and k) and HV heads of v and the state, a multiple of HK; K key
    channels and V value channels per head; channels = 2 HK K + HV V, in the order q, k, v: an engine with a projection, a convolution and
    a window for each of q, k and v lays them out next to each other. One kernel does all of it, or one behind it norms. The same bits as
    causal_conv1d_update with SiLU, kda and gated_rms_norm, one after the other, with y of out's dtype. Floating tensors may be f32, f16
    or bf16, each its own, but for mixed_qkv and conv_state, which go together; arithmetic is f32.

    […] is [batch] for one token per sequence, or [batch, T] for several, as in gdn_layer.

    mixed_qkv: […, channels]; g: […, HV K] or […, HV, K]; beta: […, HV]; views of the in-projections' outputs, with any strides
    A_log: [HV]; dt_bias: [HV K] or [HV, K] or None; the log decay is -e^A_log softplus(g + dt_bias), or with lower_bound
        lower_bound sigmoid(e^A_log (g + dt_bias)), in which A_log may be None
    norm_activation: "sigmoid"; "silu" or its other name "swish"
    Everything else: as in gdn_layer, returns and errors too. CPU tensors run the reference implementation.
    Source: Kimi Team 2025 (arXiv 2510.26692).
    """
    out, scale = result_and_scale(out, scale, mixed_qkv, state, state_layout)
    given = (
        mixed_qkv, state, conv_state, conv_weight, conv_bias, g, beta, A_log, dt_bias, z, norm_weight, out, state_indices, arrivals,
    )  # fmt: skip
    norm = (norm_eps, norm_before_gate, norm_activation)
    options = Options(*norm, allow_neg_eigval, use_qk_l2norm, scale, state_layout, pad_slot_id, update_state, lower_bound)
    more = (dst_state_indices, num_accepted_tokens, intermediate_states, intermediate_conv_window, intermediate_state_indices)
    if layer_tokens.asked_for(mixed_qkv, update_state, *more):
        return Call(several.CALLER, (*given, *more), options, pdl)
    return Call(CALLER, given, options, pdl)


# torch.library: what torch.compile and opcheck see.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "kda_layer(Tensor mixed_qkv, Tensor(a!) state, Tensor(b!) conv_state, Tensor conv_weight, Tensor? conv_bias, Tensor g, Tensor beta, "
    "Tensor? A_log, Tensor? dt_bias, Tensor? z, Tensor? norm_weight, Tensor(c!) out, Tensor? state_indices, Tensor(d!) arrivals, "
    "float eps, bool norm_before_gate, str activation, bool allow_neg_eigval, bool l2norm, float scale, str layout, int pad_slot_id, "
    "float? lower_bound, bool? pdl) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


def _dispatch(given: Sequence[Any], options: Options, pdl: bool | None) -> None:
    torch.ops.ssmgen.kda_layer(*given, *options[:SAID], options.lower_bound, pdl)


def _received(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, bool | None]:
    """(given, options, pdl) of what torch's dispatcher gives."""
    given, (*said, lower_bound, pdl) = args[: len(NAMES)], args[len(NAMES) :]
    return given, Options(*said, lower_bound=lower_bound), pdl


@torch.library.impl(_library, "kda_layer", "CUDA")
@torch.library.impl(_library, "kda_layer", "CPU")
def _op(*args: Any) -> None:
    CALLER.plan(*_received(args))()


@torch.library.register_fake("ssmgen::kda_layer", lib=_library)
def _fake(*args: Any) -> None:
    CALLER.foresee(*_received(args))


_required = frozenset(("mixed_qkv", "state", "conv_state", "conv_weight", "g", "beta", "out", "arrivals"))
FAMILY = family_of(OPERATOR, KdaLayerProblem, KdaLayerSpec)
CALLER = Caller(FAMILY, OPERATOR, NAMES, _required, views_of, run_reference, _dispatch, runtime.Patterns())
