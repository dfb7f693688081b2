"""`ssmgen check`: one variant through the emulator, against the float64 reference, on operands made from the spec alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..accuracy import norm_error
from ..arguments import Arguments
from ..calls.checks import DTYPES
from ..errors import SsmgenError
from ..families.causal_conv1d import call as conv_op
from ..families.causal_conv1d.spec import ConvSpec
from ..families.causal_conv1d_update import call as update_op
from ..families.causal_conv1d_update.spec import UpdateSpec
from ..families.combine_splits import call as combine_op
from ..families.combine_splits.spec import CombineSpec
from ..families.delta_layer import gdn_call as gdn_op
from ..families.delta_layer import gdn_tokens_call as gdn_tokens_op
from ..families.delta_layer import kda_call as kda_op
from ..families.delta_layer import kda_tokens_call as kda_tokens_op
from ..families.delta_layer import planning as delta_op
from ..families.delta_layer.gdn_spec import GdnLayerSpec
from ..families.delta_layer.gdn_tokens_spec import GdnLayerTokensSpec
from ..families.delta_layer.kda_spec import KdaLayerSpec
from ..families.delta_layer.kda_tokens_spec import KdaLayerTokensSpec
from ..families.delta_layer.spec import DeltaLayerSpec
from ..families.delta_layer.tokens_spec import DeltaLayerTokensSpec
from ..families.gated_rms_norm import call as norm_op
from ..families.gated_rms_norm.spec import NormSpec
from ..families.linear_attention import planning as linear_op
from ..families.linear_attention.problem import Beta, Gate, Update
from ..families.linear_attention.spec import LinearAttentionSpec
from ..families.linear_attention.views import Form, Options
from ..families.mamba2_layer import call as mamba2_op
from ..families.mamba2_layer import tokens_call as mamba2_tokens_op
from ..families.mamba2_layer.spec import Mamba2LayerSpec
from ..families.mamba2_layer.tokens_spec import Mamba2LayerTokensSpec
from ..families.replay_selective_state_update import operands as replay_operands
from ..families.replay_selective_state_update import planning as replay_op
from ..families.replay_selective_state_update.spec import ReplaySpec
from ..families.selective_state_update import call as ssu_op
from ..families.selective_state_update import tokens_call as tokens_op
from ..families.selective_state_update.reference import selective_state_update as ssu_reference
from ..families.selective_state_update.spec import SsuSpec
from ..families.selective_state_update.tokens_spec import SsuTokensSpec
from ..spec import Arch, DType, KernelSpec
from . import layer_operands, operands, run

LIMIT = (0.01, 0.1)
LOWER_BOUND = -5.0
BETWEEN = ("mix", "sums")  # what one kernel of a call leaves for the next
# Norm error that one rounding to the dtype, and f32 arithmetic, leave.
TOLERANCE = {DType.F32: 2e-6, DType.F16: 6e-4, DType.BF16: 5e-3}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Norm errors against float64; infinite where something was written that must not be."""

    state_error: float  # of intermediate states and of a ring too
    out_error: float
    blocks: int
    passed: bool


class Trial(NamedTuple):
    """One launch, and what it should do."""

    named: dict[str, Tensor]  # operands in the kernel's order
    views: dict[str, Tensor]  # the same as the reference takes them
    values: Mapping[str, int | float]  # the kernel's other arguments
    written: tuple[str, ...]
    reference: Callable[[dict[str, Tensor]], None]
    grid: int
    tokens: int = 1
    launch_of: Callable[[Any], tuple[Mapping[str, int | float], int]] | None = None  # (values, grid), where the call is several kernels
    exact: tuple[str, ...] = ()  # of what is written: copies of inputs
    slack: Mapping[str, float] = {}  # of what is written: more than one rounding's norm error, for what is rounded on the way there


def check(spec: KernelSpec, arch: Arch, batch: int = 3, seed: int = 0) -> Outcome:
    """Runs a variant on `batch` sequences, the second of them padded if there are slots.

    Raises EmulatorError when the kernel does what it must not, EmulatorMissingError without a compiler, SpecError.
    """
    if type(spec) not in _TRIALS:
        raise SsmgenError(f"{spec.family} has no reference to be checked against")
    spec.check(arch)
    trial = _TRIALS[type(spec)](spec, batch, seed)
    before = {name: trial.views[name].clone() for name in trial.written}
    expected = {name: t.double() if t.is_floating_point() else t.clone() for name, t in before.items()}
    trial.reference(trial.views | expected)
    for part in spec.kernels:
        values, grid = trial.launch_of(part) if trial.launch_of else (trial.values, trial.grid)
        named = {name: trial.named[name] for name in part.operands()} if trial.launch_of else trial.named
        packed = Arguments(part, values).at([t.data_ptr() for t in named.values()])
        run(part, arch, grid, packed, named, trial.written)
    errors = {name: _error(trial.views[name], before[name], expected[name]) for name in trial.written if name not in BETWEEN}
    passed = all(error <= _limit(trial, name) for name, error in errors.items())
    return Outcome(max((e for name, e in errors.items() if name != "out"), default=0.0), errors.get("out", 0.0), trial.grid, passed)


def _limit(trial: Trial, name: str) -> float:
    if name in trial.exact:
        return 0.0
    rounding = TOLERANCE[DTYPES[trial.views[name].dtype]]
    return (max(rounding, 1e-5) if name == "out" else rounding) + (trial.tokens - 1) * TOLERANCE[DType.F32] + trial.slack.get(name, 0.0)


def _error(result: Tensor, before: Tensor, expected: Tensor) -> float:
    """Of what the reference changes, by the first two axes: slot and head, sequence and token, …. The rest must be as it was, NaN too."""
    if not result.is_floating_point():
        return 0.0 if torch.equal(result, expected) else float("inf")
    result, before, expected = (t.double()[(...,) + (None,) * max(0, 3 - t.dim())] for t in (result, before, expected))
    nothing, infinite = expected.isnan(), expected.isinf() & (result == expected)
    changed = ((expected != before) & ~(nothing & before.isnan())).flatten(2).any(-1)
    unharmed = torch.equal(result[~changed].nan_to_num(), before[~changed].nan_to_num()) and torch.equal(result.isnan(), nothing)
    result, expected = result.masked_fill(infinite | nothing, 0), expected.masked_fill(infinite | nothing, 0)
    return norm_error(result[changed], expected[changed]) if unharmed else float("inf")


def _ssu(spec: SsuSpec, batch: int, seed: int) -> Trial:
    named = operands.ssu(spec, batch, seed)
    views = ssu_op.headed_views(named, problems := [])
    assert not problems, problems
    limit = LIMIT if spec.dt_limit else None
    options: dict[str, Any] = {"dt_softplus": spec.dt_softplus, "dt_limit": limit, "dtype": torch.float64}  # unrounded: without noise
    values = ssu_op.kernel_values(spec, views, -1, limit)
    return Trial(named, views, values, ("state", "out"), lambda v: ssu_reference(**v, **options), batch * spec.nheads * spec.tiles)


def _ssu_tokens(spec: SsuTokensSpec, batch: int, seed: int) -> Trial:
    named = operands.ssu_tokens(spec, batch, seed)
    options = (spec.dt_softplus, LIMIT if spec.dt_limit else None, -1, spec.philox_rounds, spec.update is not Update.NONE)
    views = tokens_op.token_views(named, options, problems := [])
    assert not problems, problems
    written = tuple(n for n in tokens_op.FAMILY.written if n in named and (options[4] or n != "state"))
    values, grid = tokens_op.kernel_values(spec, views, options), tokens_op.grid_of(spec, views)
    return Trial(named, views, values, written, lambda v: tokens_op.run_reference(v, options, torch.float64), grid, spec.chunk + 1)


def _linear(spec: LinearAttentionSpec, batch: int, seed: int) -> Trial:
    named = operands.linear_attention(spec, batch, seed)
    form = Form(spec.delta.value, spec.gate.value, spec.beta_form.value, spec.l2norm)
    update, scale = spec.update is not Update.NONE, spec.dim_k**-0.5
    options = Options(form, scale, LOWER_BOUND, spec.layout.value, update_state=update, commit=spec.commit)
    views = linear_op.views_of(named, options, problems := [])
    assert not problems, problems
    written = [n for n in ("state", "out", "intermediate_states", *map("ring_{}".format, spec.ringed())) if n in named]
    written = tuple(n for n in written if update or n != "state")
    values, grid = linear_op.kernel_values(spec, views, options), linear_op.grid_of(spec, views)
    longest = max(operands.tokens_of(spec, batch))
    return Trial(named, views, values, written, lambda v: linear_op.run_reference(v, options, torch.float64), grid, longest)


def _convolution(op: Any, options: Any, exact: tuple[str, ...], named: dict[str, Tensor], spec: Any) -> Trial:
    """Of either module's operator: `exact` is what may be written beside out."""
    views = op.views_of(named, options, problems := [])
    assert not problems, problems
    exact = tuple(name for name in exact if name in named)
    values, grid = op.kernel_values(spec, views, options), op.grid_of(spec, views)
    return Trial(named, views, values, ("out", *exact), lambda v: op.run_reference(v, options, torch.float64), grid, exact=exact)


def _conv(spec: ConvSpec, batch: int, seed: int) -> Trial:
    named = operands.causal_conv1d(spec, batch, seed)
    return _convolution(conv_op, conv_op.Options(spec.silu), ("final_states", "conv_states"), named, spec)


def _update(spec: UpdateSpec, batch: int, seed: int) -> Trial:
    named = operands.causal_conv1d_update(spec, batch, seed)
    return _convolution(update_op, (spec.silu, -1), ("conv_state", "intermediate_conv_window"), named, spec)


def _replay(spec: ReplaySpec, batch: int, seed: int) -> Trial:
    named = replay_operands.replay(spec, batch, seed)
    precision = {terms: name for name, terms in replay_op.PRECISIONS.items()}[spec.terms]
    room = named["old_x"].shape[1] - spec.window
    options = replay_op.Options(
        spec.dt_softplus, -1, spec.philox_rounds, precision, spec.after_conv, room, spec.two_kernels, materialize=spec.materialize
    )
    views = replay_op.views_of(named, options, problems := [])
    assert not problems, problems
    written = tuple(dict.fromkeys(name for part in spec.kernels for name in part.written()))
    exact = tuple(n for n in written if n not in ("state", "out", "old_dt", "old_dA_cumsum", *BETWEEN))

    def launch_of(part: ReplaySpec) -> tuple[Mapping[str, int | float], int]:
        return replay_op.kernel_values(part, views, options), batch * part.blocks

    def reference(v: dict[str, Tensor]) -> None:
        replay_op.run_reference({n: t for n, t in v.items() if n not in BETWEEN}, options, torch.float64)

    values, grid = launch_of(spec)
    tokens = spec.window + spec.tokens
    return Trial(named, views, values, written, reference, grid, tokens, launch_of, exact)


def _layer(op: Any, options: Any, exact: Any, named: dict[str, Tensor], spec: Any) -> Trial:
    """Of a decode layer, by its operator's module; `exact`: options of the reference.

    What passes from one operator to the next is rounded: what is normed, once more; what is convolved, as in the reference, unless
    float64 lies at the other side of a tie.
    """
    convolved = TOLERANCE[spec.conv_dtype]
    slack = {"state": convolved, "out": convolved + (TOLERANCE[spec.out] if spec.norm else 0.0)}
    views = op.views_of(named, options, problems := [])
    assert not problems, problems

    def launch_of(part: KernelSpec) -> tuple[Mapping[str, int | float], int]:
        return op.FAMILY.values_of(part, views, options), op.FAMILY.grid_of(part, views)

    slack |= {"intermediate_states": slack["state"]}
    written = [name for name in op.FAMILY.written if name in named]
    if getattr(spec, "update", Update.FINAL) is Update.NONE:
        written = [name for name in written if name not in ("state", "conv_state", "arrivals")]
    values, grid = launch_of(spec)
    return Trial(
        named, views, values, tuple(written), lambda v: op.run_reference(v, exact, torch.float64), grid,
        getattr(spec, "conv_tokens", 1), launch_of, ("conv_state", "arrivals", "intermediate_conv_window"), slack,
    )  # fmt: skip


def _mamba2_layer(spec: Mamba2LayerSpec | Mamba2LayerTokensSpec, batch: int, seed: int) -> Trial:
    limit = LIMIT if spec.dt_limit else None
    several = isinstance(spec, Mamba2LayerTokensSpec)
    op, update = (mamba2_tokens_op, spec.update is not Update.NONE) if several else (mamba2_op, True)
    norm = (1e-5, spec.norm_size or None, spec.norm_first)
    options = op.Options(*norm, spec.dt_softplus, limit, spec.A_is_log, -1, spec.philox_rounds, update)
    exact = options._replace(philox_rounds=0)  # unrounded: without noise
    return _layer(op, options, exact, layer_operands.mamba2_layer(spec, batch, seed), spec)


def _delta_layer(op: Any, spec: DeltaLayerSpec | DeltaLayerTokensSpec, batch: int, seed: int) -> Trial:
    twice, scale = spec.beta_form is Beta.TWICE_SIGMOID, spec.dim_k**-0.5
    norm = (1e-6, spec.norm_first, spec.norm_activation.value)
    bound = LOWER_BOUND if spec.gate is Gate.BOUNDED else None
    options = delta_op.Options(*norm, twice, spec.l2norm, scale, spec.layout.value, -1, spec.update is not Update.NONE, bound)
    return _layer(op, options, options, layer_operands.delta_layer(spec, batch, seed), spec)


def _combine(spec: CombineSpec, batch: int, seed: int) -> Trial:
    named = operands.combine_splits(spec, batch, seed)
    options = combine_op.Options(2, "e", skip_single=spec.skip_single)
    views = combine_op.views_of(named, options, problems := [])
    assert not problems, problems
    values, grid = combine_op.kernel_values(spec, views, options), combine_op.grid_of(spec, views)
    written = tuple(name for name in ("out", "lse_out") if name in named)
    return Trial(named, views, values, written, lambda v: combine_op.run_reference(v, options, torch.float64), grid)


def _norm(spec: NormSpec, batch: int, seed: int) -> Trial:
    named = operands.gated_rms_norm(spec, batch, seed)
    options = norm_op.Options(1e-5, spec.norm_first, spec.activation.value)
    views = norm_op.views_of(named, options, problems := [])
    assert not problems, problems
    values, grid = norm_op.kernel_values(spec, views, options), norm_op.grid_of(spec, views)
    return Trial(named, views, values, ("out",), lambda v: norm_op.run_reference(v, options, torch.float64), grid)


_TRIALS: dict[type[KernelSpec], Callable[[Any, int, int], Trial]] = {
    SsuSpec: _ssu,
    ReplaySpec: _replay,
    SsuTokensSpec: _ssu_tokens,
    LinearAttentionSpec: _linear,
    ConvSpec: _conv,
    UpdateSpec: _update,
    CombineSpec: _combine,
    Mamba2LayerSpec: _mamba2_layer,
    Mamba2LayerTokensSpec: _mamba2_layer,
    GdnLayerSpec: partial(_delta_layer, gdn_op),
    GdnLayerTokensSpec: partial(_delta_layer, gdn_tokens_op),
    KdaLayerSpec: partial(_delta_layer, kda_op),
    KdaLayerTokensSpec: partial(_delta_layer, kda_tokens_op),
    NormSpec: _norm,
}
