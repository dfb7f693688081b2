"""What gdn_layer and kda_layer of several tokens per sequence share: their operands checked, turned into a problem, and planned."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from ...calls import checks
from ...calls.checks import INDEX
from ...calls.planning import Family
from ...engine import layer_tokens, layer_views
from ...spec import Index, KernelSpec, PoolMode
from ..linear_attention.problem import Tokens
from . import planning as layer
from .planning import Options
from .tokens_spec import DeltaLayerTokensProblem, DeltaLayerTokensSpec


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands with heads, as of one token (delta_layer.py), with a tokens axis behind the batch's; intermediate_states [rows, tokens,
    HV, V, K]. Adds to `problems` all that is wrong."""
    if not checks.check_tensors(named, problems):
        return {}
    if not layer_tokens.check_axis(named, "mixed_qkv", options.update_state, problems) or not layer.check_operands(
        named, options, problems
    ):
        return {}
    separate = "kda" if "g" in named else "gated_delta_rule"
    if not layer_tokens.check_tokens(named, "mixed_qkv", separate, options.update_state, problems):
        return {}
    if "intermediate_states" in named and named["intermediate_states"].dtype != named["state"].dtype:
        problems.append(f"intermediate_states is {named['intermediate_states'].dtype}, not the state's {named['state'].dtype}")
    return {} if problems else layer.with_heads(named, options)


def problem_of(
    kind: type[DeltaLayerTokensProblem], views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options
) -> DeltaLayerTokensProblem:
    """The problem of a kind of layer that checked operands pose, given where they lie."""
    by_index = views.get("intermediate_state_indices") if "intermediate_states" in views else None
    return kind(
        **layer.problem_fields(views, pointers, options),
        **layer_tokens.conv_fields(views, pointers, "mixed_qkv"),
        tokens=Tokens.MANY,
        pool=PoolMode.SPLIT if "dst_state_indices" in views else PoolMode.SINGLE,
        update=layer_tokens.update_of(views, options.update_state),
        accepted=INDEX[views["num_accepted_tokens"].dtype if "num_accepted_tokens" in views else None],
        intermediates="intermediate_states" in views,
        intermediate_indices=Index.NONE if by_index is None else INDEX[by_index.dtype],
    )


_AXES = layer_tokens.AXES | {
    "state": ("slot",), "g": ("batch", "token", "head"), "gk": ("batch", "token", "head", "n"), "beta": ("batch", "token", "head"),
    "A_log": ("head",), "dt_bias": ("head", "n"), "out": ("batch", "token", "head", "row"),
}  # fmt: skip


def kernel_values(call_names: Mapping[str, str], spec: KernelSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every argument of one of the kernels that is not a pointer."""
    return layer_views.kernel_values(spec, views, _AXES, layer.scalars(options) | layer_tokens.values(views), call_names)


def family_of(operator: str, problem: type[DeltaLayerTokensProblem], spec: type[DeltaLayerTokensSpec]) -> Family:
    return Family(
        operator,
        written=layer_tokens.WRITTEN,
        problem_of=partial(problem_of, problem),
        size_of=lambda views: views["out"].shape[0],
        grid_of=layer_views.grid_of,
        values_of=partial(kernel_values, spec.call_names),
    )
