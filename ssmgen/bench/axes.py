"""The variables of a benchmark. An axis is an option of the command, an argument of `run`, and a field of the rows of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from inspect import isfunction
from types import SimpleNamespace
from typing import Any

import click

from ..select.models import Model, find_model, models
from ..spec.kernel import DType
from . import bench_of
from .schema import COUNT, FLAG, PART, TEXT, Kind, list_of

Option = Callable[[Any], Any]


class At(SimpleNamespace):
    """A case: the value on each axis, by name."""


def share_of(at: At) -> Any:
    """The model of a case, by name or by itself, as one of at.tp tensor-parallel ranks has it. Raises ModelError."""
    return at.model if isinstance(at.model, Model) else find_model(at.model).divided(at.tp)


def uses(op: str, model: Model) -> bool:
    """Whether the benchmark of an operator has a model's shapes."""
    return bench_of(op).of_model(model, 1, True) is not None


def users(op: str) -> list[Model]:
    """The models that use an operator."""
    return [model for model in models().values() if uses(op, model)]


def states_of(model: Model) -> list[DType]:
    """The model's own state dtype, and the dtype that serving engines use."""
    return list(dict.fromkeys((model.state, DType.BF16)))


class Choice(click.Choice):
    """An option whose texts are the values of enums; the command gets the member."""

    def __init__(self, *enums: type[Enum]):
        self.members = {member.value: member for enum in enums for member in enum}
        super().__init__(list(self.members))

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if isinstance(value, Enum) else self.members[super().convert(value, param, ctx)]


class Shape(click.ParamType):
    """Sizes of at least 1, written like `example`."""

    def __init__(self, name: str, example: str):
        self.name, self.example = name, example
        self.count = example.count(",") + 1

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            sizes = tuple(map(int, value.split(","))) if isinstance(value, str) else value
        except ValueError:
            sizes = ()
        if len(sizes) != self.count or min(sizes) < 1:
            self.fail(
                f"{value!r} is wrong; expected {('two', 'three', 'four')[self.count - 2]} positive numbers such as {self.example}",
                param,
                ctx,
            )
        return sizes


@dataclass(frozen=True, eq=False)
class Axis:
    """name: the field of a row. argument: of `run`. default: the values where the argument is None or empty; or their function of the
    axes before this one.

    head: the report's head has the value too, which is the same for all rows. hidden: no field of rows. later: earlier reports may lack it.
    """

    name: str
    argument: str
    option: Option
    kind: Kind
    default: Iterable[Any] | Callable[[At], Iterable[Any]]
    head: bool = False
    hidden: bool = False
    later: bool = False
    many: bool = False  # the argument is a sequence of values
    members: Mapping[str, Enum] | None = None

    def values(self, chosen: Any, at: At) -> Iterable[Any]:
        """Values of this axis for the cases whose earlier axes are `at`."""
        if chosen is None or chosen == ():
            return self.default(at) if callable(self.default) else self.default
        values = chosen if self.many else (chosen,)
        return [self.members.get(value, value) if self.members and isinstance(value, str) else value for value in values]

    @property
    def field(self) -> str:
        """The name in a schema."""
        return f"{self.name}?" if self.later else self.name


def _kind(kind: Any) -> Kind:
    if isinstance(kind, Shape):
        return list_of(COUNT, kind.count)
    return COUNT if isinstance(kind, click.IntRange) else PART if isinstance(kind, click.FloatRange) else TEXT


def _members(kind: Any) -> Mapping[str, Enum] | None:
    return kind.members if isinstance(kind, Choice) else None


def several(flag: str, argument: str, kind: Any, default: Any, help: str, name: str = "", **how: Any) -> Axis:
    """An axis whose option may repeat. name: the flag's name if not given."""
    option = click.option(flag, argument, type=kind, multiple=True, help=help)
    default = default if isfunction(default) else tuple(default)
    return Axis(name or flag[2:].replace("-", "_"), argument, option, _kind(kind), default, many=True, members=_members(kind), **how)


def one(flag: str, kind: Any, default: Any = None, help: str = "", of: Any = None, **how: Any) -> Axis:
    """A choice for all cases. of: the values where it is None, if there is no default."""
    option = click.option(flag, type=kind, default=default, show_default=default is not None, help=help or None)
    name, values = flag[2:].replace("-", "_"), (default,) if of is None else of
    return Axis(name, name, option, _kind(kind), values, members=_members(kind), **how)


def switch(flag: str, name: str, default: Any, help: str, **how: Any) -> Axis:
    """A flag; or two, `--a/--b`, of which neither need be given."""
    option = click.option(flag, name, default=None, help=help) if "/" in flag else click.option(flag, name, is_flag=True, help=help)
    return Axis(name, name, option, FLAG, default, **how)


def batches(*default: int) -> Axis:
    words = "1 … 256" if len(default) > 4 else ", ".join(map(str, default))
    return several("--batch", "batches", click.IntRange(1), default, f"Batch size; may repeat. Default: {words}.")


def tokens(help: str = "Tokens per sequence; may repeat. Default: 1.") -> Axis:
    return several("--tokens", "tokens", click.IntRange(1), (1,), help)


def forms(kind: type[Enum], default: Iterable[Enum | None], words: str) -> Axis:
    return several("--form", "forms", Choice(kind), default, f"Form of the operator; may repeat. Default: {words}.")


def states(default: Any, words: str, *narrow: type[Enum]) -> Axis:
    return several("--state", "states", Choice(DType, *narrow), default, f"State dtype; may repeat. Default: {words}.")


def intermediates(default: Any) -> Axis:
    return switch(
        "--intermediates/--no-intermediates", "intermediates", default, "Keep the state after each token. Default: with several tokens."
    )


HOT = switch("--hot/--cold", "hot", (True, False), "Inputs in the L2 cache (hot) or not (cold). Default: both, if they fit.")
TREE = switch("--tree", "tree", (False,), "Also time a draft tree in which each token has two children.", head=True, later=True)
TP = one("--tp", click.IntRange(1), 1, "Tensor-parallel ranks.", hidden=True)
