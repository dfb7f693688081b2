"""Products of linear layers with constant multipliers, such as Falcon-H1's, and sums, in one launch of an accelerated model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...errors import NotBuiltError
from ...families.skinny_linear.call import skinny_linear
from ...families.skinny_linear.operands import MOST
from ..shared import linears
from . import siblings

_scales: WeakKeyDictionary[torch.nn.Linear, tuple[Any, Tensor]] = WeakKeyDictionary()  # of a layer, and the values it was made of
_refused: WeakSet[torch.nn.Linear] = WeakSet()  # layers whose kernel may not be compiled


@dataclass
class After:
    """The operations after a layer's next product: * times + residual, None for none. result: theirs, if the product's launch had them"""

    times: float | None = None
    residual: Tensor | None = None
    result: Tensor | None = None


class _State(threading.local):
    """The operations after the next product of each layer, and the last products that `prepare` made, in this thread."""

    def __init__(self) -> None:
        self.after: dict[torch.nn.Linear, After] = {}
        self.prepared: tuple[list[Any], ref[Tensor], float] | None = None


_state = _State()


@contextmanager
def after(layer: torch.nn.Linear, operations: After) -> Iterator[After]:
    """The layer's first product within computes these operations, if it can."""
    before, _state.after = _state.after, {**_state.after, layer: operations}
    try:
        yield operations
    finally:
        _state.after = before


@contextmanager
def nothing_after() -> Iterator[None]:
    """Products within do not compute the operations after them."""
    before, _state.after = _state.after, {}
    try:
        yield
    finally:
        _state.after = before


def finished(layer: Any, x: Tensor) -> Tensor | None:
    """layer(x) and the operations after it; None if there are none, or if skinny_linear does not serve the call."""
    wanted = _state.after.get(layer)
    return None if wanted is None or wanted.result is not None else product(layer, x)


def product(
    layer: Any, x: Tensor, values: tuple[Any, ...] = (), make: Callable[[], Tensor] | None = None, dtype: torch.dtype | None = None
) -> Tensor | None:
    """layer(x) * make(), and the operations after it, rounded once; None if skinny_linear does not serve the call.

    values: the inputs of make, whose result is [N] or a number; it is made again when they change   dtype: of the result; None for x's
    """
    wanted = _state.after.get(layer)
    wanted = None if wanted is not None and wanted.result is not None else wanted
    times, residual = (None, None) if wanted is None else (wanted.times, wanted.residual)
    shape = (*x.shape[:-1], layer.weight.shape[0])
    if is_compiling() or not serves(layer, x) or layer in _refused or (residual is not None and not _is_like(residual, x, shape)):
        return None
    scale = None
    if make is not None or times is not None:
        factor = 1.0 if times is None else times
        made = (lambda: torch.tensor(factor)) if make is None else (lambda: make() * factor)
        scale = None if layer.bias is not None else scale_of(layer, (*values, times), made)
        if scale is None:
            return None
    out = None if dtype is None else x.new_empty(shape, dtype=dtype)
    try:
        found: Tensor = skinny_linear(linears.in_rows(x), layer.weight, layer.bias, scale=scale, residual=residual, out=out)  # type: ignore[assignment]
    except NotBuiltError as e:
        _refused.add(layer)
        siblings.told("a multiplier or a sum after a linear layer is an operation of its own", e)
        return None
    if wanted is not None:
        wanted.result = found
    return found


def prepare(layers: list[Any], x: Tensor, times: float) -> bool:
    """Computes the products of x * times with these layers in one launch, where they wait for calls with x. Returns whether it did."""
    if len(layers) > MOST or any(not serves(m, x) or m.bias is not None or m in _refused or not siblings.fit(layers[0], m) for m in layers):
        return False
    scales = [scale for m in layers if (scale := constant(m, times)) is not None]
    if len(scales) < len(layers):
        return False
    try:
        results = siblings.multiply(layers, x, scales)
    except NotBuiltError as e:
        _refused.update(layers)
        siblings.told("a multiplier before linear layers is an operation of its own", e)
        return False
    siblings.keep(layers, x, results)
    _state.prepared = layers, ref(x), times
    return True


def prepare_again(layer: Any, x: Tensor) -> None:
    """Repeats prepare, if its last call was for this layer and this x: for a second run of the layers."""
    if _state.prepared is not None and layer in _state.prepared[0] and _state.prepared[1]() is x:
        layers, _, times = _state.prepared
        prepare(layers, x, times)


def _is_like(residual: Any, x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a residual is a tensor of a product's shape and dtype, with rows that skinny_linear reads, and no gradient is recorded."""
    if not isinstance(residual, Tensor) or residual.shape != shape or residual.dtype != x.dtype or residual.device != x.device:
        return False
    return residual.is_contiguous() and not (torch.is_grad_enabled() and residual.requires_grad)


def serves(layer: Any, x: Tensor) -> bool:
    """Whether a layer is accelerated, and multiplies this x by skinny_linear."""
    if type(layer) is not torch.nn.Linear or "forward" not in layer.__dict__ or not siblings.fit(layer, layer):
        return False  # such as a layer that has got an adapter
    most = linears.most_rows(layer.weight.dtype, linears.tensor_cores(layer.weight.device))
    return linears.fits(x, layer.weight, layer.bias, most)


def scale_of(layer: torch.nn.Linear, values: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor | None:
    """The layer's scales, in f32; None if they would be made in a captured graph."""
    known = _scales.get(layer)
    if known is not None and known[0] == values and known[1].device == layer.weight.device:
        return known[1]
    if layer.weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad():
        scale = make().to(layer.weight.device, torch.float32).expand(layer.weight.shape[0]).contiguous()
    _scales[layer] = (values, scale)
    return scale


def constant(layer: torch.nn.Linear, value: float) -> Tensor | None:
    """scale_of a number."""
    return scale_of(layer, (value,), lambda: torch.tensor(value))
