"""Gated MLPs, down(silu(gate(x)) * up(x)), and squared ones, down(relu(up(x))^2). All but down is one launch, for few rows.
Gate and down may be multiplied by constants, as in Falcon-H1. Gate and up may be halves of one layer's output, as in Granite 4.

An MLP is found by its forward's source, whatever it calls its layers. The activation is of the f32 sums, and its result is rounded once.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...errors import NotBuiltError
from ...families.skinny_linear.call import GATED, RELU2, skinny_linear
from ..shared import linears
from . import scaled, siblings
from .roles import plain

FUNCTIONS = ("F.silu", "nn.functional.silu", "torch.nn.functional.silu")
SILU, SQUARE = ("SiLU", "SiLUActivation"), ("ReLUSquaredActivation",)  # classes of activations


class Parts(NamedTuple):
    """Names of an MLP's layers. gate: empty for a squared MLP; up's name for a layer whose output has both in its halves. act: of its
    activation; empty for a function of torch. Multipliers of gate and down are empty for none"""

    gate: str
    up: str
    down: str
    act: str = ""
    gate_times: str = ""
    down_times: str = ""


@cache
def parts(kind: Any) -> Parts | None:
    """The parts of a class whose forward computes such an MLP and nothing else; None for all other classes."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain(kind.forward))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) != 2 or function.args.vararg or function.args.kwonlyargs:
        return None
    result = _result(function)
    return None if result is None else _of(result, function.args.args[1].arg)


class _Values(ast.NodeTransformer):
    """Replaces local names by their values."""

    def __init__(self) -> None:
        self.values: dict[str, ast.expr] = {}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return deepcopy(self.values.get(node.id, node))


def _result(function: ast.FunctionDef) -> ast.expr | None:
    """The result of a function that only assigns to names and returns, as one expression of its arguments."""
    names = _Values()
    for statement in function.body[1:] if ast.get_docstring(function) is not None else function.body:
        match statement:
            case ast.Assign([ast.Name(name)], value):
                names.values[name] = names.visit(value)
            case ast.Assign([ast.Tuple([ast.Name(one), ast.Name(other)])], value):
                both = names.visit(value)
                names.values |= {name: ast.Subscript(both, ast.Constant(i), ast.Load()) for i, name in enumerate((one, other))}
            case ast.Return(ast.expr() as value):
                found: ast.expr = names.visit(value)
                return found
            case _:
                return None
    return None


def _times(value: ast.expr) -> tuple[ast.expr, str]:
    """(y, name) of y * self.name; (value, nothing) of anything else."""
    match value:
        case ast.BinOp(inner, ast.Mult(), ast.Attribute(ast.Name("self"), name)):
            return inner, name
    return value, ""


def _of(value: ast.expr, x: str) -> Parts | None:
    value, times = _times(value)
    match value:
        case ast.Call(ast.Attribute(ast.Name("self"), down), [ast.BinOp(one, ast.Mult(), other)], []):
            for acted, plain_one in ((one, other), (other, one)):
                up = _layer(plain_one, x) or _half(plain_one, x, 1)
                match acted:
                    case ast.Call(ast.Attribute() as act, [inner], []) if up:
                        of_gate, gate_times = _times(inner)
                        gate = _layer(of_gate, x) or _half(of_gate, x, 0)
                        name = act.attr if ast.unparse(act.value) == "self" else ""
                        half = _half(of_gate, x, 0)
                        alike = half == _half(plain_one, x, 1) and (half or gate != up)  # halves of one layer, or two layers
                        if gate and alike and (name or ast.unparse(act) in FUNCTIONS) and not (gate_times and gate == up):
                            return Parts(gate, up, down, name, gate_times, times)
        case ast.Call(ast.Attribute(ast.Name("self"), down), [ast.Call(ast.Attribute(ast.Name("self"), act), [inner], [])], []):
            if up := _layer(inner, x):
                return Parts("", up, down, act, "", times)
    return None


def _layer(value: ast.expr, x: str) -> str:
    """The name in self.name(x); empty for anything else."""
    match value:
        case ast.Call(ast.Attribute(ast.Name("self"), name), [ast.Name(given)], []) if given == x:
            return name
    return ""


def _half(value: ast.expr, x: str, which: int) -> str:
    """The name in self.name(x).chunk(2, dim=-1)[which]; empty for anything else."""
    match value:
        case ast.Subscript(ast.Call(ast.Attribute(inner, "chunk"), [ast.Constant(2)], [ast.keyword("dim", dim)]), ast.Constant(index)):
            return _layer(inner, x) if index == which and ast.unparse(dim) == "-1" else ""
    return ""


def layers(mlp: Any) -> list[Any]:
    """The layers of a module whose class has parts, down last: gate and up, or one for both, or only up."""
    found = _parts(mlp)
    return [getattr(mlp, name, None) for name in dict.fromkeys(filter(None, (found.gate, found.up, found.down)))]


def _parts(mlp: Any) -> Parts:
    kind: Any = type(mlp)
    found = parts(kind)
    assert found is not None
    return found


def is_served(module: torch.nn.Module) -> bool:
    """Whether a module is an MLP like that, of plain linear layers with equal gate and up."""
    kind: Any = type(module)
    found = parts(kind)
    if found is None or "forward" in module.__dict__:
        return False
    act = getattr(module, found.act, None) if found.act else None
    acts = not found.act or type(act).__name__ in (SILU if found.gate else SQUARE)
    *first, down = layers(module)
    if not acts or not first or any(type(layer) is not torch.nn.Linear for layer in (*first, down)):
        return False
    if len({layer.weight.shape for layer in first}) > 1 or (found.gate == found.up and first[0].weight.shape[0] % 16):
        return False
    times = [getattr(module, name) for name in (found.gate_times, found.down_times) if name]
    return all(isinstance(m, (int, float)) for m in times) and (not found.gate_times or first[0].bias is None)  # which it multiplies, too


def forward(self: Any, x: Tensor) -> Any:
    """The forward of an MLP whose layers `linears` has."""
    if not is_compiling():
        *first, down = layers(self)
        if _fits(self, x, first) and (scales := _scales(self, first)) is not None:
            try:
                return _down(self, down, multiply(self, x, scales))
            except NotBuiltError as e:
                del self.__dict__["forward"]
                siblings.told("the layers of an MLP multiply one by one", e)
    return type(self).forward(self, x)


def _scales(mlp: Any, first: Sequence[Any]) -> list[Tensor] | None:
    """The scales of gate and up, none for 1; None if they cannot be made now."""
    known = _parts(mlp)
    times = getattr(mlp, known.gate_times) if known.gate_times else 1.0
    if times == 1.0:
        return []
    gate, up = (scaled.constant(layer, value) for layer, value in zip(first, (times, 1.0), strict=True))
    return None if gate is None or up is None else [gate, up]


def multiply(mlp: Any, x: Tensor, scales: Sequence[Tensor] = ()) -> Tensor:
    """The x of down, before rounding in f32. scales: of gate and up"""
    known = _parts(mlp)
    first = layers(mlp)[:-1]
    weights, biases = [layer.weight for layer in first], [layer.bias for layer in first if layer.bias is not None]
    if known.gate == known.up:
        weights, biases = [*weights[0].chunk(2)], [half for bias in biases for half in bias.chunk(2)]
    how: Any = {"activation": GATED if known.gate else RELU2} | ({"scale": [*scales]} if scales else {})
    found: Tensor = skinny_linear(linears.in_rows(x), weights, biases or None, **how)  # type: ignore[assignment]  # of one output
    return found


def _down(mlp: Any, layer: Any, h: Tensor) -> Any:
    """The last product, with its multiplier."""
    known = _parts(mlp)
    times = getattr(mlp, known.down_times) if known.down_times else 1.0
    if times == 1.0:
        return layer(h)
    found = scaled.product(layer, h, (times,), lambda: torch.tensor(times))
    return layer(h) * times if found is None else found


def _fits(mlp: Any, x: Tensor, first: Sequence[Any]) -> bool:
    """Whether the layers still are ours, and serve this x."""
    name = _parts(mlp).act
    act: Any = getattr(mlp, name) if name else None
    heard = act is not None and (act._forward_hooks or act._forward_pre_hooks)
    return not heard and all(scaled.serves(layer, x) and siblings.fit(first[0], layer) for layer in first)
