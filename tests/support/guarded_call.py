"""A call of a public function: its arguments, the memory around them, and what the library makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ssu_cases import Memory
from torch import Tensor

import ssmgen


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

    def results(self) -> list[Tensor]:
        """All tensors that the call writes."""
        return [self.operands[n] for n in self.family.written if n in self.operands]
