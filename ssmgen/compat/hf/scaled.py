"""Products of linear layers and constant multipliers, such as Falcon-H1's, in one launch of an accelerated model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...errors import NotBuiltError
from ...families.skinny_linear.call import skinny_linear
from ..shared import linears
from . import siblings

_scales: WeakKeyDictionary[torch.nn.Linear, tuple[Any, Tensor]] = WeakKeyDictionary()  # of a layer, and the values it was made of
_refused: WeakSet[torch.nn.Linear] = WeakSet()  # layers whose kernel may not be compiled


def product(layer: Any, x: Tensor, values: tuple[Any, ...], make: Callable[[], Tensor], dtype: torch.dtype | None = None) -> Tensor | None:
    """layer(x) * make(), rounded once; None if skinny_linear does not serve the call.

    values: the inputs of make, whose result is [N] or a number; it is made again when they change   dtype: of the result; None for x's
    """
    if is_compiling() or not serves(layer, x) or layer.bias is not None or layer in _refused:
        return None
    scale = scale_of(layer, values, make)
    if scale is None:
        return None
    out = None if dtype is None else x.new_empty((*x.shape[:-1], layer.weight.shape[0]), dtype=dtype)
    try:
        found: Tensor = skinny_linear(linears.in_rows(x), layer.weight, scale=scale, out=out)  # type: ignore[assignment]
    except NotBuiltError as e:
        _refused.add(layer)
        siblings.told("a multiplier after a linear layer is an operation of its own", e)
        return None
    return found


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
