"""Gated MLPs, down(silu(gate(x)) * up(x)): `accelerate` has gate, up and the product of both in one launch, for few rows.

An MLP is found by its forward's source, whatever it calls its layers. silu and the product are of the f32 sums, rounded once.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...errors import NotBuiltError
from ...families.skinny_linear.call import ACTIVATION, skinny_linear
from ..shared import linears
from . import siblings
from .roles import plain

FUNCTIONS = ("F.silu", "nn.functional.silu", "torch.nn.functional.silu")


class Parts(NamedTuple):
    """Names of an MLP's layers. act: of its activation; empty for a function of torch"""

    gate: str
    up: str
    down: str
    act: str = ""


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
    return None


def _of(value: ast.expr, x: str) -> Parts | None:
    match value:
        case ast.Call(ast.Attribute(ast.Name("self"), down), [ast.BinOp(one, ast.Mult(), other)], []):
            for acted, plain_one in ((one, other), (other, one)):
                up = _layer(plain_one, x)
                match acted:
                    case ast.Call(ast.Attribute() as act, [inner], []) if up and (gate := _layer(inner, x)):
                        name = act.attr if ast.unparse(act.value) == "self" else ""
                        if name or ast.unparse(act) in FUNCTIONS:
                            return Parts(gate, up, down, name)
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
    return silu and all(type(layer) is torch.nn.Linear for layer in (gate, up, down)) and gate.weight.shape == up.weight.shape


def forward(self: Any, x: Tensor) -> Any:
    """The forward of a gated MLP whose layers `linears` has."""
    if not is_compiling():
        gate, up, down = layers(self)
        if _fits(x, gate, up):
            try:
                return down(multiply(gate, up, x))
            except NotBuiltError as e:
                del self.__dict__["forward"]
                siblings.told("gate and up of an MLP multiply one by one", e)
    return type(self).forward(self, x)


def multiply(gate: torch.nn.Linear, up: torch.nn.Linear, x: Tensor) -> Tensor:
    """silu(gate(x)) * up(x)"""
    biases = None if gate.bias is None else [gate.bias, up.bias]
    found: Tensor = skinny_linear(linears.in_rows(x), [gate.weight, up.weight], biases, activation=ACTIVATION)  # type: ignore[assignment]
    return found


def _fits(x: Tensor, gate: Any, up: Any) -> bool:
    """Whether both layers still are ours, and serve this x."""
    if not all(type(layer) is torch.nn.Linear and "forward" in layer.__dict__ for layer in (gate, up)):
        return False  # such as a layer that has got an adapter
    most = linears.most_rows(gate.weight.dtype, linears.tensor_cores(gate.weight.device))
    alike = siblings.fit(gate, gate) and siblings.fit(gate, up)
    return alike and all(linears.fits(x, layer.weight, layer.bias, most) for layer in (gate, up))
