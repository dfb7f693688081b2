"""Linear layers of a model that multiply the same x share a launch: q, k and v of attention, gate and up of an MLP.

The groups are learned from calls: the first time each layer multiplies by itself. Afterwards the first layer of a group computes all
results, and the others find theirs when they are called with that x. A result that is not called for ends the sharing of its layers.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...errors import NotBuiltError
from ...families.skinny_linear.call import skinny_linear
from ...families.skinny_linear.operands import MOST
from ..shared import linears
from .elsewhere import is_elsewhere

Linear = torch.nn.Linear
X = tuple[Callable[[], Tensor | None], int]
REMEMBERED = 4  # x whose layers are being learned: low-rank gates have others in between


class Group(NamedTuple):
    """Layers that multiply the same x, the first one first. ran: numbers of rows whose kernel is loaded"""

    members: tuple[ref[Linear], ...]
    ran: set[int]


class Waiting(NamedTuple):
    """A result that was computed early."""

    x: X
    stream: int | None
    out: Tensor


class _State(threading.local):
    """Results that wait in this thread, and the layers that multiplied the last x."""

    def __init__(self) -> None:
        self.waiting: dict[Linear, Waiting] = {}
        self.seen: list[tuple[X, list[ref[Linear]]]] = []


_state = _State()
_groups: WeakKeyDictionary[Linear, Group | None] = WeakKeyDictionary()  # of each layer in it; None: does not share again


def forget(module: Linear) -> None:
    """Ends the sharing of a layer's group, which may be learned again."""
    group = _groups.pop(module, None)
    for member in _alive(group) if group is not None else ():
        _groups.pop(member, None)
        _state.waiting.pop(member, None)
    _state.seen.clear()


def groups(modules: list[Linear]) -> list[Group]:
    """The groups of these layers, each once."""
    return [*{id(group): group for m in modules if (group := _groups.get(m)) is not None}.values()]


def load(modules: list[Linear], rows: int) -> None:
    """Loads the kernels of the groups of these layers, for a number of rows that they have kernels for."""
    for group in groups(modules):
        members = _alive(group)
        if (x := zeros(members[0], rows)) is not None:
            multiply(members, x)
            group.ran.add(rows)


def zeros(module: Linear, rows: int) -> Tensor | None:
    """An x with this number of rows; None for more than skinny_linear multiplies."""
    weight = module.weight
    x = weight.new_zeros(rows, weight.shape[1])
    return x if linears.fits(x, weight, None, linears.most_rows(weight.dtype, linears.tensor_cores(weight.device))) else None


def product(module: Linear, x: Tensor) -> Tensor:
    """The layer's product with x, which `linears.fits`; with the products of the layers that multiply this x next."""
    if is_compiling() or x.is_inference():  # whose changes are not counted
        return linears.product(x, module.weight, module.bias)
    waiting = _state.waiting.pop(module, None)
    group = _groups.get(module)
    if waiting is not None:
        if _same(waiting.x, x) and waiting.stream == _stream(x):
            return waiting.out
        _end(group)
    elif group is not None and group.members[0]() is module:
        if any(member in _state.waiting for member in _alive(group)):
            _end(group)
        elif (out := _together(group, x)) is not None:
            return out
    out = linears.product(x, module.weight, module.bias)
    if module not in _groups:
        _learn(module, x)
    return out


def multiply(members: list[Linear], x: Tensor, scales: Sequence[Tensor] | None = None) -> list[Tensor]:
    """The products of layers that `fit`, in one launch. scales: of each layer's outputs; None for 1.

    Products of one row are neighbours in memory, for `projections.joined`."""
    biases = None if members[0].bias is None else [m.bias for m in members]
    weights = [m.weight for m in members]
    outs = None
    if x.numel() == x.shape[-1]:
        sizes = [weight.shape[0] for weight in weights]
        outs = x.new_empty((*x.shape[:-1], sum(sizes))).split(sizes, dim=-1)
    found = skinny_linear(linears.in_rows(x), weights, biases, scale=scales, out=outs)
    return [found] if isinstance(found, Tensor) else [*found]


def keep(members: list[Linear], x: Tensor, results: list[Tensor]) -> None:
    """Results that wait until their layers are called with this x."""
    for member, result in zip(members, results, strict=True):
        _state.waiting[member] = Waiting((ref(x), x._version), _stream(x), result)


def _together(group: Group, x: Tensor) -> Tensor | None:
    """The first layer's product; the others wait. None if a layer has changed, or if the kernel is not loaded and a graph is captured."""
    members, rows = _alive(group), x.numel() // x.shape[-1]
    if len(members) < len(group.members) or not all(fit(members[0], m) for m in members):
        _end(group)
        return None
    if rows not in group.ran and x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    try:
        out, *others = multiply(members, x)
    except NotBuiltError as e:
        _end(group)
        told(f"{len(members)} linear layers that could share a launch multiply one by one", e)
        return None
    group.ran.add(rows)
    keep(members[1:], x, others)
    return out


def told(words: str, e: NotBuiltError) -> None:
    """Warns of a launch that stays several, because SSMGEN_COMPILE=deny forbids to compile its kernel."""
    warnings.warn(f"{words}: {e}", RuntimeWarning, stacklevel=2)


def fit(one: Linear, other: Linear) -> bool:
    """Whether two layers can share a launch, and whether nothing else listens to their calls or brings their weights."""
    a, b = (one.weight, one.bias), (other.weight, other.bias)
    alike = [None if s is None or t is None else (s.dtype, s.device) == (t.dtype, t.device) for s, t in zip(a, b, strict=True)]
    plain = not (other._forward_hooks or other._forward_pre_hooks or is_elsewhere(other))
    return plain and a[0].shape[1] == b[0].shape[1] and alike[0] is True and (alike[1] is True or (one.bias is None and other.bias is None))


def _learn(module: Linear, x: Tensor) -> None:
    if not fit(module, module):
        return
    for given, layers in _state.seen:
        first = layers[0]() if layers else None
        if first is not None and _same(given, x) and len(layers) < MOST and fit(first, module) and _groups.get(first, first) is not None:
            layers.append(ref(module))
            group = Group((*layers,), set())
            for member in _alive(group):
                _groups[member] = group
            return
    _state.seen = [((ref(x), x._version), [ref(module)]), *_state.seen[: REMEMBERED - 1]]


def _end(group: Group | None) -> None:
    """The layers of a group never share again, because they do not always multiply the same x."""
    for member in _alive(group) if group is not None else ():
        _groups[member] = None
        _state.waiting.pop(member, None)


def _alive(group: Group) -> list[Linear]:
    return [m for member in group.members if (m := member()) is not None]


def _same(given: X, x: Tensor) -> bool:
    known, version = given
    return known() is x and version == x._version


def _stream(x: Tensor) -> Any:
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None
