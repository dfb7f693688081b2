"""Changes that a fuzzer makes to one argument of a valid call: other kinds, dtypes, axes, sizes, strides and layouts, other scalars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor


class CannotBeError(Exception):
    """This change is impossible for this value."""


class Sub(Tensor):
    """A subclass that is memory like any other."""


OTHER_KINDS: Mapping[str, Callable[[Tensor], Any]] = {
    "None": lambda t: None,
    "list": lambda t: t.tolist(),
    "tuple": lambda t: (t,),
    "pair": lambda t: (t, t.clone()),
    "int": lambda t: 3,
    "float": lambda t: 0.5,
    "bool": lambda t: True,
    "str": lambda t: "cpu",
    "bytes": lambda t: b"x",
    "dict": lambda t: {"t": t},
    "shape": lambda t: t.shape,
    "type": lambda t: Tensor,
    "object": lambda t: object(),
    "empty": lambda t: [],
    "array": lambda t: np.zeros(tuple(t.shape), np.float32),
}
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.float8_e4m3fn, torch.uint16,
)  # fmt: skip


def other_kind(t: Any, rng: Random) -> Any:
    return OTHER_KINDS[rng.choice(list(OTHER_KINDS))](t)


def other_dtype(t: Tensor, rng: Random) -> Tensor:
    return t.to(rng.choice([d for d in DTYPES if d is not t.dtype]))


def quantised(t: Tensor, rng: Random) -> Tensor:
    if rng.random() < 0.5 or not t.dim():
        return torch.quantize_per_tensor(t.float(), 0.1, 0, rng.choice((torch.quint8, torch.qint8, torch.qint32)))
    n = t.shape[0]
    return torch.quantize_per_channel(t.float(), torch.ones(n), torch.zeros(n, dtype=torch.int64), 0, torch.qint8)


def an_axis_more(t: Tensor, rng: Random) -> Tensor:
    return t.unsqueeze(rng.randint(0, t.dim()))


def an_axis_less(t: Tensor, rng: Random) -> Tensor:
    axis = _axis(t, rng)
    return rng.choice((lambda: t.select(axis, 0), lambda: t.flatten(), lambda: t.flatten(0, axis)))()


def no_axis(t: Tensor, rng: Random) -> Tensor:
    return t.new_zeros(())


def another_size(t: Tensor, rng: Random) -> Tensor:
    axis = _axis(t, rng)
    n = t.shape[axis]
    size = rng.choice((0, 0, 1, n - 1, n + 1, 2 * n))
    return t.index_select(axis, torch.arange(size) % n)


def nothing(t: Tensor, rng: Random) -> Tensor:
    return t.new_empty([0] * rng.randint(1, 4))


def expanded(t: Tensor, rng: Random) -> Tensor:
    axis = _axis(t, rng)
    return t.narrow(axis, 0, 1).expand(t.shape)


def strided(t: Tensor, rng: Random) -> Tensor:
    """The same values, otherwise in memory."""
    axis, way = _axis(t, rng), rng.randint(0, 3)
    if way == 0:
        return t.repeat_interleave(2, axis).unflatten(axis, (-1, 2)).select(axis + 1, 0)
    if way == 1:
        return t.transpose(axis, -1).contiguous().transpose(axis, -1)
    if way == 2:
        wide = t.new_empty(*t.shape[:-1], t.shape[-1] + 3)[..., 1:-2]
        return wide.copy_(t)
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def overlapping(t: Tensor, rng: Random) -> Tensor:
    axis = _axis(t, rng)
    strides = list(t.stride())
    strides[axis] = rng.randint(1, 2)
    return t.as_strided(t.shape, strides) if t.numel() else t


def far_apart(t: Tensor, rng: Random) -> Tensor:
    """Strides that no kernel's arguments hold, along an axis of one; no memory is touched there."""
    axis = _axis(t, rng)
    strides = list(t.stride())
    strides[axis] = rng.choice((2**31, 2**32, 2**40))
    return t.narrow(axis, 0, 1).as_strided([1 if a == axis else n for a, n in enumerate(t.shape)], strides)


def sparse(t: Tensor, rng: Random) -> Tensor:
    ways = [t.to_sparse, lambda: t.to_sparse(1), lambda: t.flatten(1).to_sparse_csr(), lambda: t.flatten(1).to_sparse_csc()]
    return rng.choice(ways)()


def nested(t: Tensor, rng: Random) -> Tensor:
    layout = rng.choice((torch.strided, torch.jagged))
    return torch.nested.nested_tensor(list(t.unbind(0)), layout=layout)


def mkldnn(t: Tensor, rng: Random) -> Tensor:
    return t.to_mkldnn()


def meta(t: Tensor, rng: Random) -> Tensor:
    return t.to("meta")


def with_grad(t: Tensor, rng: Random) -> Tensor:
    t = t.detach().clone().requires_grad_()
    return rng.choice((t, torch.nn.Parameter(t), t * 1))


def negated(t: Tensor, rng: Random) -> Tensor:
    """A view with torch's negative bit: its values are minus the values in memory."""
    view = torch.complex(t.float(), -t.float()).conj().imag
    return view if view.is_neg() else _none()


def conjugated(t: Tensor, rng: Random) -> Tensor:
    return torch.complex(t.float(), t.float()).conj()


def subclass(t: Tensor, rng: Random) -> Tensor:
    return rng.choice((lambda: t.as_subclass(Sub), lambda: torch.nn.Parameter(t, requires_grad=False)))()


def other_values(t: Tensor, rng: Random) -> Tensor:
    if t.dtype.is_floating_point:
        return torch.full_like(t, rng.choice((math.nan, math.inf, -math.inf, 0.0, torch.finfo(t.dtype).max, -1e30)))
    if t.dtype is torch.bool:
        return ~t
    most = torch.iinfo(t.dtype).max
    return torch.full_like(t, rng.choice((most, -most - 1, -1, 0, 1, 1000)))


TENSORS: tuple[Callable[[Tensor, Random], Any], ...] = (
    other_kind, other_kind, other_dtype, other_dtype, quantised, an_axis_more, an_axis_less, no_axis, another_size, another_size,
    another_size, nothing, expanded, strided, strided, overlapping, far_apart, sparse, nested, mkldnn, meta, with_grad, negated, conjugated,
    subclass, other_values,
)  # fmt: skip

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 0.5, -3.0, math.nan, math.inf, -math.inf, 10**30, 2**31, 2**40, 2**63, -(2**63) - 1, 2**64, 1e300,
    "", "x", "silu", "e", b"x", (), (1,), (1, 2), (2.0, 1.0), [], [1.0, 2.0], {}, {"a": 1}, object(), Tensor, np.float32(0.5), np.int64(3),
    3j, torch.float32, torch.tensor(1), torch.tensor([1.0, 2.0]), torch.tensor(0.5),
)  # fmt: skip


def another_scalar(value: Any, rng: Random) -> Any:
    return rng.choice(SCALARS)


def _axis(t: Tensor, rng: Random) -> int:
    return rng.randrange(t.dim()) if t.dim() else _none()


def _none() -> Any:
    raise CannotBeError


def mutated(change: Callable[[Any, Random], Any], value: Any, rng: Random) -> Any:
    """The changed value. Raises CannotBeError if torch cannot make it."""
    try:
        return change(value, rng)
    except (RuntimeError, IndexError, NotImplementedError, TypeError, ValueError, AttributeError) as e:
        raise CannotBeError from e
