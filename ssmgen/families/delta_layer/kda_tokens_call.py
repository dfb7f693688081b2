"""kda_layer of several tokens per sequence: its torch operator and its caller. `kda_layer.py` has the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import runtime
from ...calls.planning import Caller
from ...engine import layer_tokens
from .kda_tokens_spec import OPERATOR, KdaLayerTokensProblem, KdaLayerTokensSpec
from .planning import Options, run_reference
from .tokens_planning import family_of, views_of

NAMES = (
    "mixed_qkv", "state", "conv_state", "conv_weight", "conv_bias", "g", "beta", "A_log", "dt_bias", "z", "norm_weight", "out",
    "state_indices", "arrivals", *layer_tokens.OPTIONAL,
)  # fmt: skip

# torch.library: what torch.compile and opcheck see.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "kda_layer_tokens(Tensor mixed_qkv, Tensor(a!) state, Tensor(b!) conv_state, Tensor conv_weight, Tensor? conv_bias, Tensor g, "
    "Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? z, Tensor? norm_weight, Tensor(c!) out, Tensor? state_indices, "
    "Tensor(d!) arrivals, Tensor? dst_state_indices, Tensor? num_accepted_tokens, Tensor(e!)? intermediate_states, "
    "Tensor(f!)? intermediate_conv_window, Tensor? intermediate_state_indices, float eps, bool norm_before_gate, "
    "str activation, bool allow_neg_eigval, bool l2norm, float scale, str layout, "
    "int pad_slot_id, bool update_state, float? lower_bound, bool? pdl) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


def _dispatch(given: Sequence[Any], options: Options, pdl: bool | None) -> None:
    torch.ops.ssmgen.kda_layer_tokens(*given, *options, pdl)


def _received(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, bool | None]:
    """(given, options, pdl) of what torch's dispatcher gives."""
    return args[: len(NAMES)], Options(*args[len(NAMES) : -1]), args[-1]


@torch.library.impl(_library, "kda_layer_tokens", "CUDA")
@torch.library.impl(_library, "kda_layer_tokens", "CPU")
def _op(*args: Any) -> None:
    CALLER.plan(*_received(args))()


@torch.library.register_fake("ssmgen::kda_layer_tokens", lib=_library)
def _fake(*args: Any) -> None:
    CALLER.foresee(*_received(args))


_required = frozenset(("mixed_qkv", "state", "conv_state", "conv_weight", "g", "beta", "out", "arrivals"))
FAMILY = family_of(OPERATOR, KdaLayerTokensProblem, KdaLayerTokensSpec)
CALLER = Caller(FAMILY, "kda_layer", NAMES, _required, views_of, run_reference, _dispatch, runtime.Patterns())
