"""Arguments of public functions that are not tensors: the allowed values of each, checked before the rest of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from operator import index
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..spec.family import records

MOST = torch.finfo(torch.float32).max  # kernels take numbers as f32
I64 = 2**63


class Scalar(NamedTuple):
    """The allowed values of an argument."""

    words: str  # follows "… is 5, not "
    holds: Callable[[Any], bool]
    kept: Callable[[Any], Any] | None = None  # converts a value for the call; None: unchanged


def number(words: str = "a number", least: float = -MOST) -> Scalar:
    """A finite number of at least `least`, in float32's range; integers must fit in 64 bits, as torch's do."""

    def holds(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return least <= value <= MOST and (isinstance(value, float) or -I64 <= value < I64)

    return Scalar(f"{words} in the range of float32 or int64", holds, float)


def integer(words: str, least: int = -I64, most: int = I64 - 1) -> Scalar:
    """An integer, including other integer types such as numpy's. Tensors, which may be on a device, and bools are not allowed."""

    def holds(value: Any) -> bool:
        if isinstance(value, (bool, torch.Tensor)) or getattr(getattr(value, "dtype", None), "kind", "") == "b":
            return False  # "b": numpy's bool, which numpy before 2.3 accepts as an index
        try:
            return least <= index(value) <= most
        except TypeError:
            return False

    return Scalar(words, holds, index)


def one_of(words: str, *values: Any) -> Scalar:
    kinds = tuple({type(v) for v in values})
    return Scalar(words, lambda value: isinstance(value, kinds) and value in values)


def or_none(rule: Scalar) -> Scalar:
    return rule._replace(words=f"{rule.words} or None", holds=lambda value: value is None or rule.holds(value))


def _is_limit(value: Any) -> bool:
    def bound(x: Any) -> bool:
        return _NUMBER.holds(x) or (isinstance(x, float) and math.isinf(x))

    return isinstance(value, tuple) and len(value) == 2 and bound(value[0]) and bound(value[1]) and value[0] <= value[1]


SWITCH = one_of("True or False", True, False)
NOT_NEGATIVE = number("a number of 0 or more", 0.0)
POSITIVE = number("a positive number", 2.0**-149)
_NUMBER = number()

# Parameters with one meaning in all functions. A parameter whose default is a bool is a SWITCH.
COMMON = {
    "scale": _NUMBER,
    "lower_bound": _NUMBER,
    "pad_slot_id": integer("a 64-bit integer"),
    "state_layout": one_of("'vk' or 'kv'", "vk", "kv"),
    "dt_limit": Scalar("a tuple (low, high)", _is_limit, lambda value: (float(value[0]), float(value[1]))),
    "philox_rounds": integer("0 … 32", 0, 32),
    "pdl": one_of("True, False or None", True, False, None),
}


class Scalars:
    """The allowed values of one function's arguments that are not tensors."""

    def __init__(self, function: Callable[..., Any], own: Mapping[str, Scalar]):
        """own: by parameter, if it is neither a switch nor in COMMON. Raises TypeError for a parameter without a rule."""
        self.function = function.__name__
        parameters = signature(function).parameters
        self.names, self._known = tuple(parameters), frozenset(parameters)
        self.rules: dict[str, Scalar] = {}
        self.defaults: dict[str, Any] = {}
        for name, parameter in parameters.items():
            kind = str(parameter.annotation)
            if "Tensor" in kind or "Ring" in kind:
                continue
            rule = own.get(name) or (SWITCH if isinstance(parameter.default, bool) else COMMON.get(name))
            if rule is None:
                raise TypeError(f"{self.function} has no rule for its parameter {name}; expected one in its scalars")
            if "None" in kind and not rule.holds(None):
                rule = or_none(rule)
            self.rules[name], self.defaults[name] = rule, parameter.default
        self._positions = [(i, name) for i, name in enumerate(self.names) if name in self.rules]

    def sound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], tuple[str, ...]]:
        """(args, kwargs, problems), with defaults instead of invalid values, so that the rest of the call can be checked.

        Raises TypeError for a keyword that the function does not have.
        """
        if not kwargs.keys() <= self._known:
            raise TypeError(_unexpected(self.function, [name for name in kwargs if name not in self._known]))
        problems: list[str] = []
        positional, named = list(args), dict(kwargs)
        for position, name in self._positions:
            if position < len(args):
                positional[position] = self._taken(name, args[position], problems)
        for name, value in kwargs.items():
            if name in self.rules:
                named[name] = self._taken(name, value, problems)
        return positional, named, tuple(problems)

    def checked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """(args, kwargs). Raises ArgumentError if values are invalid, and TypeError as above."""
        args, kwargs, problems = self.sound(args, kwargs)
        if problems:
            raise ArgumentError(self.function, problems)
        return args, kwargs

    def _taken(self, name: str, value: Any, problems: list[str]) -> Any:
        rule = self.rules[name]
        if rule.holds(value):
            return value if value is None or rule.kept is None else rule.kept(value)
        problems.append(f"{name} is {shown(value)}; expected {rule.words}")
        return self.defaults[name]


def _unexpected(function: str, keywords: Sequence[str]) -> str:
    """The error for unknown keywords of a function, and the functions that have them."""
    functions = [family.part(place) for family in records() for place in family.functions.values()]
    lines = []
    for keyword in keywords:
        *others, last = [f.__name__ for f in functions if keyword in f.scalars.names] or [""]
        having = f"{', '.join(others)} and {last} have it" if others else f"{last} has it" if last else "no function has it"
        lines.append(f"{function}() got an unexpected keyword {keyword!r}; {having}")
    return "\n".join(lines)


def shown(value: Any, inside: bool = False) -> str:
    """A value as messages show it: in full if it is plain and short."""
    kind = type(value)
    if kind is int and abs(value) >= 2**128:  # Python does not convert very long integers
        return f"an integer of {value.bit_length()} bits"
    if kind is str and len(value) > 40:
        return f"{value[:40]!r}…"
    if kind in (int, str, float, bool, type(None)):
        return repr(value)
    if kind in (tuple, list) and len(value) <= 4 and not inside:
        items = ", ".join([shown(v, True) for v in value])
        return f"[{items}]" if kind is list else f"({items},)" if len(value) == 1 else f"({items})"
    return f"{'an' if kind.__name__[0] in 'aeio' else 'a'} {kind.__name__}"
