"""What is tuned: the calls of each operator's benchmark, on rotating cold inputs, for the models that use it or for its own shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import ssmgen

from ..bench import layers
from ..bench import report as reports
from ..bench.layer_case import Case as Layer
from ..calls.checks import TORCH_DTYPES
from ..calls.public import Call
from ..errors import SsmgenError
from ..families.causal_conv1d import bench as conv
from ..families.causal_conv1d.spec import ConvLayout
from ..families.causal_conv1d_update import bench as conv_update
from ..families.combine_splits import bench as combine
from ..families.gated_rms_norm import bench as norm
from ..families.linear_attention import bench as linear
from ..families.replay_selective_state_update import bench as replay
from ..families.selective_state_update import bench as ssu
from ..models import Model, find_model, models
from ..spec import DType

BATCHES = (1, 8, 64, 256)
PROMPT = 2048  # tokens of a model's prompts


class Case(NamedTuple):
    """A call at one size, as `sets` calls that differ in where their operands lie."""

    label: str
    sets: int
    call: Callable[[int], Call]
    gate: Callable[[], Any]  # of what is served now, against float64; raises SsmgenError


def cases(
    operator: str,
    names: Sequence[str] = (),
    batches: Sequence[int] = (),
    tokens: Sequence[int] = (),
    tp: int = 1,
    device: str = "cuda",
) -> Iterator[Case]:
    """Each made when it is asked for: its buffers are gone before the next one's. names: models; none for all that use the operator, or
    for the benchmark's shapes; tp: of how many ranks one is. Raises SsmgenError for a model that does not use it."""
    if operator not in CASES and operator not in linear.OPS:
        raise SsmgenError(f"{operator} is not tuned; known: {', '.join((*CASES, *linear.OPS))}")
    given = [find_model(name).divided(tp) for name in names]
    if wrong := [m.name for m in given if not _uses(operator, m)]:
        raise SsmgenError(f"{', '.join(wrong)}: not decoded by {operator}")
    if operator in CASES:
        yield from CASES[operator](given, batches or BATCHES, tokens or (1,), device)
    else:
        yield from _linear(operator, given, batches or BATCHES, tokens or (1,), device)


def used(operator: str, names: Sequence[str]) -> bool:
    """Whether each of these models, or of none, uses the operator. Raises ModelError."""
    return all(_uses(operator, find_model(name)) for name in names)


def _uses(operator: str, model: Model) -> bool:
    if operator.startswith("causal_conv1d"):
        return bool(model.conv_channels)
    if operator == "replay_selective_state_update":
        return model.kind == "mamba2"
    if operator == "gated_rms_norm":
        return model.norm_shape is not None
    if operator in layers.MODELS:
        return model.layer_function == operator
    return model.function == operator  # no model's is combine_splits: models.toml does not know of attention


def _users(operator: str) -> list[Model]:
    return [model for model in models().values() if _uses(operator, model)]


def _states(model: Model) -> list[DType]:
    """The model's own, and what serving engines make of it."""
    return list(dict.fromkeys((model.state, DType.BF16)))


def _slots(pool: Any, least_bytes: float, batch: int) -> int:
    return max(math.ceil(least_bytes / pool[0].nbytes), reports.MIN_SETS * batch)


def _pool(shape: Sequence[int], state: DType, batches: Sequence[int], least_bytes: float, device: str) -> Any:
    """Slots enough for cold inputs of every batch."""
    slot = math.prod(shape) * state.size
    return reports.normal_pool(max(math.ceil(least_bytes / slot), reports.MIN_SETS * max(batches)), shape, TORCH_DTYPES[state], device)


def _ssu(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    for model in given or _users("selective_state_update"):
        mamba1 = model.kind == "mamba1"
        shape = (model.headdim, model.d_state) if mamba1 else (model.nheads, model.headdim, model.d_state)
        for state in [model.state] if mamba1 else _states(model):
            pool = _pool(shape, state, batches, ssu.POOL_BYTES, device)
            for T, batch in product([1] if mamba1 else tokens, batches):
                bench = ssu.Case(model, pool[: _slots(pool, ssu.POOL_BYTES, batch)], batch, T, T > 1)
                yield Case(f"{model.name} {state.value} T {T} batch {batch}", bench.sets, partial(_ssu_call, bench), bench.gate)


def _ssu_call(bench: ssu.Case, i: int) -> Call:
    args, kwargs = bench.arguments(i)
    return ssmgen.selective_state_update.build(*args, **kwargs, pdl=True)


def _linear(operator: str, given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    shapes = [(m.name, m.nheads, m.key_heads, m.dim_v, m.dim_k, _states(m)) for m in given or _users(operator)]
    if not shapes:
        recurrence = linear.OPS[operator]
        heads, key_heads, dim = linear.shape(operator, None, None, None)
        shapes = [(f"{heads} x {dim} x {dim}", heads, key_heads, dim, dim, [recurrence.state])]
    for name, heads, key_heads, V, K, states in shapes:
        for state in states:
            pool = _pool((heads, V, K), state, batches, linear.POOL_BYTES, device)
            for T, batch in product(tokens, batches):
                bench = linear.Case(operator, pool[: _slots(pool, linear.POOL_BYTES, batch)], key_heads, batch, T, T > 1)
                yield _case(f"{operator} {name} {state.value} T {T} batch {batch}", bench)


def _conv(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    """Models' prompts, or the benchmark's shapes, whose batches and lengths are their own."""
    shapes = [(batch, m.conv_channels, PROMPT) for m in given for batch in batches] or conv.SHAPES
    for layout, shape in product(ConvLayout, shapes):
        yield _case(f"convolution, {layout.value} {shape}", conv.Case(shape, layout, device=device))


def _conv_update(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    dims = dict.fromkeys(m.conv_channels for m in given) or {12288: None}
    for dim, innermost, T in product(dims, conv_update.Innermost, tokens):
        inner = (dim, 2 + T) if innermost is conv_update.Innermost.WINDOW else (2 + T, dim)
        pool = _pool(inner, DType.BF16, batches, conv_update.POOL_BYTES, device)
        for batch in batches:
            bench = conv_update.Case(pool[: _slots(pool, conv_update.POOL_BYTES, batch)], innermost, batch, T)
            yield _case(f"convolution of {dim} channels, {innermost.value} T {T} batch {batch}", bench)


def _replay(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    shapes = [(m.nheads, m.headdim, m.d_state, m.ngroups) for m in given] or [replay.SHAPE]
    for shape, state, window, batch in product(shapes, (DType.BF16, DType.F32), replay.WINDOWS, batches):
        bench = replay.Case(batch, window=window, shape=shape, dtype=TORCH_DTYPES[state], device=device)
        label = f"replay {' x '.join(map(str, shape))} {state.value} window {window} batch {batch}"
        yield _case(label, bench, partial(bench.gate, replay.PLAIN))


def _combine(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    for form, state, d_v in product((combine.Form.DENSE, combine.Form.PREFIX), (DType.F32, DType.BF16), (128, 512)):
        for shape in combine.SHAPES:
            yield _case(
                f"combine, {form.value} {shape} d_v {d_v} {state.value}", combine.Case(shape, d_v, form, TORCH_DTYPES[state], device=device)
            )


def _norm(given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    """Models' norms, or the benchmark's shapes."""
    shapes = [(norm.FORMS[m.kind], m.norm_shape) for m in given] or [(form, shape) for form in norm.Form for shape in norm.SHAPES[form]]
    for (form, shape), rows in product(dict.fromkeys(shapes), batches):
        yield _case(f"norm, {form.value} {rows} x {shape}", norm.Case(rows, shape, form, device=device))


def _layer(operator: str, given: Sequence[Model], batches: Sequence[int], tokens: Sequence[int], device: str) -> Iterator[Case]:
    """Models' layers."""
    for model in given or _users(operator):
        rows, elements, _ = model.shape
        for state in _states(model):
            pool = _pool((model.nheads, rows, elements), state, batches, layers.POOL_BYTES, device)
            for batch, count in product(batches, tokens):
                bench = Layer(operator, model, pool[: _slots(pool, layers.POOL_BYTES, batch)], batch, count, count > 1)
                several = f" T {count}" if count > 1 else ""
                yield _case(f"{operator} {model.name} {state.value}{several} batch {batch}", bench)


CASES = {
    "selective_state_update": _ssu,
    "causal_conv1d": _conv,
    "causal_conv1d_update": _conv_update,
    "replay_selective_state_update": _replay,
    "combine_splits": _combine,
    "gated_rms_norm": _norm,
    **{operator: partial(_layer, operator) for operator in layers.MODELS},
}


def _case(label: str, bench: Any, gate: Callable[[], Any] | None = None) -> Case:
    return Case(label, bench.sets, lambda i: bench.function.build(**bench.arguments(i), pdl=True), gate or bench.gate)
