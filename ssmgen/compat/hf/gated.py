"""Gated MLPs, down(silu(gate(x)) * up(x)): `accelerate` has gate, up and the product of both in one launch, for few rows. Gate and down may
be multiplied by constants, as in Falcon-H1.

An MLP is found by its forward's source, whatever it calls its layers. silu and the product are of the f32 sums, rounded once.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...errors import NotBuiltError
from ...families.skinny_linear.call import GATED, skinny_linear
from ..shared import linears
from . import scaled, siblings
from .roles import plain

FUNCTIONS = ("F.silu", "nn.functional.silu", "torch.nn.functional.silu")


class Parts(NamedTuple):
    """Names of an MLP's layers. act: of its activation; empty for a function of torch. Multipliers of gate and down are empty for none"""

    gate: str
    up: str
    down: str
    act: str = ""
    gate_times: str = ""
    down_times: str = ""


@cache
def parts(kind: Any) -> Parts | None:
    """The parts of a class whose forward computes a gated MLP and nothing else; None for all other classes."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain(kind.forward))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) != 2 or function.args.vararg or function.args.kwonlyargs:
        return None
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    match body:
        case [ast.Return(ast.expr() as value)]:
            return _of(value, function.args.args[1].arg)
        case [ast.Assign([ast.Name(name)], value), ast.Return(ast.Name(given))] if name == given:
            return _of(value, function.args.args[1].arg)
        case [ast.Assign([ast.Name(name)], product), ast.Assign([ast.Name(to)], value), ast.Return(ast.Name(given))] if name == to == given:
            down, times = _times(value)
            if layer := _layer(down, name):
                found = _of(ast.Call(ast.Attribute(ast.Name("self"), layer), [product], []), function.args.args[1].arg)
                return None if found is None else found._replace(down_times=times)
    return None


def _times(value: ast.expr) -> tuple[ast.expr, str]:
    """(y, name) of y * self.name; (value, nothing) of anything else."""
    match value:
        case ast.BinOp(inner, ast.Mult(), ast.Attribute(ast.Name("self"), name)):
            return inner, name
    return value, ""


def _of(value: ast.expr, x: str) -> Parts | None:
    match value:
        case ast.Call(ast.Attribute(ast.Name("self"), down), [ast.BinOp(one, ast.Mult(), other)], []):
            for acted, plain_one in ((one, other), (other, one)):
                up = _layer(plain_one, x)
                match acted:
                    case ast.Call(ast.Attribute() as act, [inner], []) if up and (gate := _layer(_times(inner)[0], x)):
                        name = act.attr if ast.unparse(act.value) == "self" else ""
                        if name or ast.unparse(act) in FUNCTIONS:
                            return Parts(gate, up, down, name, _times(inner)[1])
    return None


def _layer(value: ast.expr, x: str) -> str:
    """The name in self.name(x); empty for anything else."""
    match value:
        case ast.Call(ast.Attribute(ast.Name("self"), name), [ast.Name(given)], []) if given == x:
            return name
    return ""


def layers(mlp: Any) -> list[Any]:
    """gate, up and down of a module whose class has parts."""
    kind: Any = type(mlp)
    found = parts(kind)
    assert found is not None
    return [getattr(mlp, name, None) for name in (found.gate, found.up, found.down)]


def is_gated(module: torch.nn.Module) -> bool:
    """Whether a module is an MLP like that, of plain linear layers with equal gate and up."""
    kind: Any = type(module)
    found = parts(kind)
    if found is None or "forward" in module.__dict__:
        return False
    act = getattr(module, found.act, None) if found.act else None
    silu = not found.act or type(act) is torch.nn.SiLU or type(act).__name__ == "SiLUActivation"
    gate, up, down = layers(module)
    if not silu or any(type(layer) is not torch.nn.Linear for layer in (gate, up, down)) or gate.weight.shape != up.weight.shape:
        return False
    times = [getattr(module, name) for name in (found.gate_times, found.down_times) if name]
    return all(isinstance(m, (int, float)) for m in times) and (not found.gate_times or gate.bias is None)  # which it multiplies, too


def forward(self: Any, x: Tensor) -> Any:
    """The forward of a gated MLP whose layers `linears` has."""
    if not is_compiling():
        gate, up, down = layers(self)
        if _fits(x, gate, up) and (scales := _scales(self, gate, up)) is not None:
            try:
                return _down(self, down, multiply(gate, up, x, scales))
            except NotBuiltError as e:
                del self.__dict__["forward"]
                siblings.told("gate and up of an MLP multiply one by one", e)
    return type(self).forward(self, x)


def _scales(mlp: Any, gate: Any, up: Any) -> list[Tensor] | None:
    """The scales of gate and up, none for 1; None if they cannot be made now."""
    kind: Any = type(mlp)
    known = parts(kind)
    assert known is not None
    times = getattr(mlp, known.gate_times) if known.gate_times else 1.0
    if times == 1.0:
        return []
    first, second = scaled.constant(gate, times), scaled.constant(up, 1.0)
    return None if first is None or second is None else [first, second]


def multiply(gate: torch.nn.Linear, up: torch.nn.Linear, x: Tensor, scales: Sequence[Tensor] = ()) -> Tensor:
    """silu(gate(x)) * up(x), with scales of both products"""
    biases = None if gate.bias is None else [gate.bias, up.bias]
    how: Any = {"activation": GATED} | ({"scale": [*scales]} if scales else {})
    found: Tensor = skinny_linear(linears.in_rows(x), [gate.weight, up.weight], biases, **how)  # type: ignore[assignment]
    return found


def _down(mlp: Any, layer: Any, h: Tensor) -> Any:
    """The last product, with its multiplier."""
    kind: Any = type(mlp)
    known = parts(kind)
    assert known is not None
    times = getattr(mlp, known.down_times) if known.down_times else 1.0
    if times == 1.0:
        return layer(h)
    found = scaled.product(layer, h, (times,), lambda: torch.tensor(times))
    return layer(h) * times if found is None else found


def _fits(x: Tensor, gate: Any, up: Any) -> bool:
    """Whether both layers still are ours, and serve this x."""
    return scaled.serves(gate, x) and scaled.serves(up, x) and siblings.fit(gate, up)
