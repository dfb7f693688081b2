"""mamba2_layer of several tokens per sequence: its operands checked, turned into a problem, and planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...calls import checks
from ...calls.checks import DTYPES, INDEX
from ...calls.planning import Caller, Family
from ...engine import layer_tokens, layer_views
from ...spec import Index, KernelSpec, Loads, PoolMode
from ..selective_state_update import tokens_call as ssu
from . import views as layer
from .tokens_spec import OPERATOR, Mamba2LayerTokensProblem
from .views import Options, run_reference

NAMES = (*layer.NAMES, *layer_tokens.OPTIONAL)


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands with heads: z, out [batch, tokens, H, P]; A, D, dt_bias [H, P]; norm_weight [groups, size]. Adds to `problems`."""
    ssu.check_seed(named, options.update_state, problems)
    if not checks.check_tensors(named, problems):
        return {}
    if not layer_tokens.check_axis(named, "xBC", options.update_state, problems) or not layer.check_operands(named, options, problems):
        return {}
    if not layer_tokens.check_tokens(named, "xBC", "selective_state_update", options.update_state, problems):
        return {}
    return {} if problems else layer.with_heads(named, options)


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> Mamba2LayerTokensProblem:
    """The problem that checked operands pose, given where they lie."""
    kept, by_index = views.get("intermediate_states"), views.get("intermediate_state_indices")
    vector = layer.lane_vector(views)
    aligned = all(checks.aligned(views[n], pointers[n], vector) for n in ("state", "intermediate_states") if n in views)
    return Mamba2LayerTokensProblem(
        **layer.problem_fields(views, pointers, options),
        **layer_tokens.conv_fields(views, pointers, "xBC"),
        state_loads=Loads.VECTOR if aligned else Loads.ELEMENT,
        pool=PoolMode.SPLIT if "dst_state_indices" in views else PoolMode.SINGLE,
        update=layer_tokens.update_of(views, options.update_state),
        accepted=INDEX[views["num_accepted_tokens"].dtype if "num_accepted_tokens" in views else None],
        intermediate_states=None if kept is None else DTYPES[kept.dtype],
        intermediate_indices=Index.NONE if kept is None else INDEX[None if by_index is None else by_index.dtype],
    )


_AXES = layer_tokens.AXES | {
    "state": ("slot",), "dt": ("batch", "token", "head"), "A": ("head", "row"), "D": ("head", "row"), "dt_bias": ("head", "row"),
    "rand_seed": ("slot",), **dict.fromkeys(("z", "out"), ("batch", "token", "head", "row")),
}  # fmt: skip


def kernel_values(spec: KernelSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every argument of one of the kernels that is not a pointer."""
    return layer_views.kernel_values(spec, views, _AXES, layer.scalars(options) | layer_tokens.values(views))


FAMILY = Family(
    OPERATOR,
    written=layer_tokens.WRITTEN,
    problem_of=problem_of,
    size_of=lambda views: views["out"].shape[0],
    grid_of=layer_views.grid_of,
    values_of=kernel_values,
)


# torch.library: what torch.compile and opcheck see.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "mamba2_layer_tokens(Tensor xBC, Tensor(a!) state, Tensor(b!) conv_state, Tensor conv_weight, Tensor? conv_bias, Tensor dt, Tensor A, "
    "Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? norm_weight, Tensor(c!) out, Tensor? state_indices, Tensor? rand_seed, "
    "Tensor(d!) arrivals, Tensor? dst_state_indices, Tensor? num_accepted_tokens, Tensor(e!)? intermediate_states, "
    "Tensor(f!)? intermediate_conv_window, Tensor? intermediate_state_indices, float eps, int? group_size, bool norm_before_gate, "
    "bool dt_softplus, float[]? dt_limit, bool A_is_log, int pad_slot_id, int philox_rounds, bool update_state, bool? pdl) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


def _dispatch(given: Sequence[Any], options: Options, pdl: bool | None) -> None:
    torch.ops.ssmgen.mamba2_layer_tokens(*given, *options.dispatched(), pdl)


def _received(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, bool | None]:
    """(given, options, pdl) of what torch's dispatcher gives."""
    return args[: len(NAMES)], Options.received(args[len(NAMES) : -1]), args[-1]


@torch.library.impl(_library, "mamba2_layer_tokens", "CUDA")
@torch.library.impl(_library, "mamba2_layer_tokens", "CPU")
def _op(*args: Any) -> None:
    CALLER.plan(*_received(args))()


@torch.library.register_fake("ssmgen::mamba2_layer_tokens", lib=_library)
def _fake(*args: Any) -> None:
    CALLER.foresee(*_received(args))


CALLER = Caller(FAMILY, "mamba2_layer", NAMES, layer.REQUIRED, views_of, run_reference, _dispatch, runtime.Patterns())
