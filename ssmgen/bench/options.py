"""Options of benchmarks on the command line, as families say them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import click

from ..spec import DType, Narrow

Option = Callable[[Any], Any]


class Choice(click.Choice):
    """An option whose texts are the values of enums; the command gets the member."""

    def __init__(self, *enums: type[Enum]):
        self.members = {member.value: member for enum in enums for member in enum}
        super().__init__(list(self.members))

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if isinstance(value, Enum) else self.members[super().convert(value, param, ctx)]


class Shape(click.ParamType):
    """Sizes of at least 1, written like `example`."""

    def __init__(self, name: str = "B,D,L", example: str = "1,1536,2048"):
        self.name, self.example = name, example

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            sizes = tuple(map(int, value.split(","))) if isinstance(value, str) else value
        except ValueError:
            sizes = ()
        count = self.example.count(",") + 1
        if len(sizes) != count or min(sizes) < 1:
            self.fail(f"{value!r} is not {('two', 'three', 'four')[count - 2]} positive numbers such as {self.example}", param, ctx)
        return sizes


def together(command: Any, *options: Option) -> Any:
    """The command with these options, shown in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def several(flag: str, name: str, kind: Any, **how: Any) -> Option:
    """An option that may repeat."""
    return click.option(flag, name, type=kind, multiple=True, **how)


batches = several("--batch", "batches", click.IntRange(1), help="May repeat. Default: 1 … 256, or 1, 8, 32, 128.")
states = several("--state", "states", Choice(DType), help="State dtype; may repeat. Default: the model's or operator's.")
stored = several("--state", "states", Choice(DType, Narrow), help="State dtype; may repeat. Default: the model's or operator's.")
tokens = several("--tokens", "tokens", click.IntRange(1), help="Per sequence; may repeat. Default: 1.")
intermediates = click.option(
    "--intermediates/--no-intermediates", default=None, help="Keep each token's state. Default: if they are several."
)
tree = click.option("--tree", is_flag=True, help="A draft tree, in which each token has two children, beside the same without it.")
tp = click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
hot = click.option("--hot/--cold", "hot", default=None, help="Whether what is read is in the L2 cache. Default: both, where it fits.")
