"""A call of a public function: its arguments, the memory around them, and what the library makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from ssu_cases import Memory
from torch import Tensor

import ssmgen
from ssmgen.errors import ArgumentError


def refused(memory: Memory, function: Any, kwargs: dict[str, Any], change: dict[str, Any]) -> str:
    """The message about a call with these arguments changed, of which nothing is written. A change may be a function of the arguments."""
    with pytest.raises(ArgumentError) as e:
        function(**kwargs | {n: v(kwargs) if callable(v) else v for n, v in change.items()})
    assert not memory.untouched({}), "something was written"
    assert "Nothing was launched and the state is unchanged." in str(e.value)
    return str(e.value)


def gaps(shape: tuple[int, ...], odd: int = 0, axes: int | None = None) -> tuple[int, ...]:
    """Strides with a gap after the last `axes` axes, or after every axis, which keeps the alignment to 16 bytes without `odd`."""
    strides, reach = [1], shape[-1] + 8 + odd
    for n in reversed(shape[:-1]):
        strides.append(reach)
        reach = reach * n + (8 if axes is None or len(strides) <= axes else 0)
    return tuple(strides[::-1])


@dataclass
class GuardedCall:
    """A call's arguments and the memory around them."""

    case: Any
    memory: Memory
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        built = self.built = self.function.build(**self.kwargs)
        self.given, self.options, self.operands = built.given, built.options, built.operands
        self.caller, self.family = built.caller, built.caller.family
        self.views = self.caller.checked(self.operands, self.options, None)
        self.problem = self.family.problem_of(self.views, {n: t.data_ptr() for n, t in self.operands.items()}, self.options)

    @property
    def operator(self) -> str:
        """The public function's name."""
        raise NotImplementedError

    @property
    def function(self) -> Any:
        return getattr(ssmgen, self.operator)

    def run(self, **more: Any) -> Any:
        return self.function(**self.kwargs, **more)

    def refused(self, change: dict[str, Any]) -> str:
        return refused(self.memory, self.function, self.kwargs, change)

    def results(self) -> list[Tensor]:
        """All tensors that the call writes."""
        return [self.operands[n] for n in self.family.written if n in self.operands]
