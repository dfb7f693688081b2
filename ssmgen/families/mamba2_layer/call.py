"""mamba2_layer: a Mamba-2 layer's decode step between its projections, on torch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import runtime
from ...calls import checks
from ...calls.planning import Caller, Family
from ...calls.public import Call, operator
from ...calls.scalars import NOT_NEGATIVE, integer
from ...engine import layer_tokens, layer_views
from ...spec import KernelSpec, Loads
from ..selective_state_update import tokens_call as ssu
from . import tokens_call as several
from . import views as layer
from .spec import OPERATOR, Mamba2LayerProblem
from .views import Options, run_reference

NAMES = layer.NAMES


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
    """Decode steps of a Mamba-2 layer, from what its in-projection gives to what its out-projection takes.

    x, B, C <- silu(convolution of xBC); state <- exp(dt A) state + dt x B; y = C state + D x; out = the gated RMS norm of y and z.
    H heads of P rows (headdim), N = d_state, G groups of heads that share B and C; channels = H P + 2 G N, in the order x, B, C. One
    kernel convolves and updates the states, and one behind it norms. The same bits as causal_conv1d_update with SiLU,
    selective_state_update and gated_rms_norm, one after the other. Floating tensors may be f32, f16 or bf16, each its own, but for
    xBC and conv_state, which go together; arithmetic is f32.

    […] is [batch] for one token per sequence, or [batch, T] for several, T up to 8: all of them in one launch, with the bits of the three
    operators for T tokens. Packed sequences and draft trees are those operators' only.

    xBC: […, channels]; dt: […, H]; z, out: […, H P]: views of the in-projection's output, with any strides
    conv_state: [slots, channels, width - 1 or width], updated in place, the newest input last; any strides
    state: [slots, H, P, N], updated in place; its last three axes must be dense
    arrivals: [slots, G] int32 of zeros, kept by the caller with the states: counts, within a launch, the blocks that have read a window
    conv_weight: [channels, width], width 2 … 8; conv_bias: [channels] or None
    A: [H], negative, or with A_is_log what checkpoints hold, log(-A); D: [H] or [H, P]; dt_bias: [H]
    norm_weight: [H P], or [norm_group_size] for all groups; None: no norm, and y is multiplied by silu(z), where there is a z
    norm_group_size: channels that are normed together, None for all of a row; norm_before_gate: z gates what is normed already
    dt_softplus, dt_limit, state_indices, rand_seed, philox_rounds, pad_slot_id: as in selective_state_update, of both states. A padded row
        gets a zero output
    update_state: False leaves window and state as they are
    intermediate_states: [rows, T or more, H, P, N], of f32, f16 or bf16: receives the state after each token, and
    intermediate_conv_window: [rows, T or more, channels, width - 1] of xBC's dtype: the window after each token, in row
        intermediate_state_indices[b], [batch] int32 or int64, or b; a row that is not there is not written
    num_accepted_tokens: [batch] int32 or int64, with state_indices [batch, columns] and dst_state_indices [batch, T]: of the last call's
        tokens so many were accepted. The state is that of the slot in column num_accepted_tokens - 1, and the one after token t goes to
        slot dst_state_indices[b, t], if there is one. The window is that of the slot in the first column, of length width - 2 + T or more:
        its history begins at entry num_accepted_tokens - 1, and the new inputs are put behind it, at the front. A count that is no column,
        or whose history is not in the window, is padding, and so is a sequence without either slot
    pdl: whether the kernels may start while the ones ahead of them in the stream end; None = where the device can (sm_90 and later)

    Returns out (new, of xBC's dtype, if not given). CPU tensors run the reference implementation.
    Raises ArgumentError, UnsupportedError, CaptureError, NotBuiltError, CompileError, LoadError, LaunchError as selective_state_update.
    Source: Dao & Gu 2024 (arXiv 2405.21060); the norm: state-spaces/mamba.
    """
    if out is None and isinstance(state, Tensor) and isinstance(xBC, Tensor):
        out = xBC.new_empty((*xBC.shape[:-1], *([state.shape[1] * state.shape[2]] if state.dim() == 4 else [])))
    if rand_seed is None or philox_rounds == 0:
        rand_seed, philox_rounds = None, 0
    given = (
        xBC, state, conv_state, conv_weight, conv_bias, dt, A, D, z, dt_bias, norm_weight, out, state_indices, rand_seed, arrivals,
    )  # fmt: skip
    said = (norm_eps, norm_group_size, norm_before_gate, dt_softplus, dt_limit, A_is_log, pad_slot_id, philox_rounds, update_state)
    options = Options(*said)
    more = (dst_state_indices, num_accepted_tokens, intermediate_states, intermediate_conv_window, intermediate_state_indices)
    if layer_tokens.asked_for(xBC, update_state, *more):
        return Call(several.CALLER, (*given, *more), options, pdl)
    return Call(CALLER, given, options, pdl)


def views_of(named: Mapping[str, Tensor], options: Options, problems: list[str]) -> dict[str, Tensor]:
    """The operands with heads: z, out [batch, H, P]; A, D, dt_bias [H, P]; norm_weight [groups, size]. Adds to `problems`."""
    ssu.check_seed(named, options.update_state, problems)
    if not checks.check_tensors(named, problems) or not layer.check_operands(named, options, problems):
        return {}
    if named["xBC"].dim() == 3:  # a tokens axis of one
        named = dict(named) | {n: named[n].squeeze(1) for n in layer.TOKENWISE if n in named}
    return {} if problems else layer.with_heads(named, options)


def problem_of(views: Mapping[str, Tensor], pointers: Mapping[str, int], options: Options) -> Mamba2LayerProblem:
    """The problem that checked operands pose, given where they lie."""
    aligned = checks.aligned(views["state"], pointers["state"], layer.lane_vector(views))
    return Mamba2LayerProblem(
        **layer.problem_fields(views, pointers, options),
        **layer_views.conv_fields(views, pointers, "xBC"),
        state_loads=Loads.VECTOR if aligned else Loads.ELEMENT,
    )


_AXES = {
    "state": ("slot",), "dt": ("batch", "head"), "A": ("head", "row"), "D": ("head", "row"), "dt_bias": ("head", "row"),
    "rand_seed": ("slot",), "z": ("batch", "head", "row"), "out": ("batch", "head", "row"), "state_indices": ("batch",),
}  # fmt: skip


def kernel_values(spec: KernelSpec, views: Mapping[str, Tensor], options: Options) -> dict[str, int | float]:
    """Every argument of one of the kernels that is not a pointer."""
    return layer_views.kernel_values(spec, views, _AXES, layer.scalars(options))


FAMILY = Family(
    OPERATOR,
    written=layer_views.WRITTEN,
    problem_of=problem_of,
    size_of=lambda views: views["out"].shape[0],
    grid_of=layer_views.grid_of,
    values_of=kernel_values,
)


# torch.library: what torch.compile and opcheck see.
_library = torch.library.Library("ssmgen", "FRAGMENT")
_library.define(
    "mamba2_layer(Tensor xBC, Tensor(a!) state, Tensor(b!) conv_state, Tensor conv_weight, Tensor? conv_bias, Tensor dt, Tensor A, "
    "Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? norm_weight, Tensor(c!) out, Tensor? state_indices, Tensor? rand_seed, "
    "Tensor(d!) arrivals, float eps, int? group_size, bool norm_before_gate, bool dt_softplus, float[]? dt_limit, bool A_is_log, "
    "int pad_slot_id, int philox_rounds, bool? pdl) -> ()",
    tags=torch.Tag.needs_fixed_stride_order,
)


def _dispatch(given: Sequence[Any], options: Options, pdl: bool | None) -> None:
    torch.ops.ssmgen.mamba2_layer(*given, *options.dispatched()[:-1], pdl)  # whose states are always updated


def _received(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, bool | None]:
    """(given, options, pdl) of what torch's dispatcher gives."""
    return args[: len(NAMES)], Options.received(args[len(NAMES) : -1]), args[-1]


@torch.library.impl(_library, "mamba2_layer", "CUDA")
@torch.library.impl(_library, "mamba2_layer", "CPU")
def _op(*args: Any) -> None:
    CALLER.plan(*_received(args))()


@torch.library.register_fake("ssmgen::mamba2_layer", lib=_library)
def _fake(*args: Any) -> None:
    CALLER.foresee(*_received(args))


CALLER = Caller(FAMILY, OPERATOR, NAMES, layer.REQUIRED, views_of, run_reference, _dispatch, runtime.Patterns())
