"""Finds multipliers and sums after a branch of a block, in the text of its forward, and replaces them by calls of `branches`.

    a = self.mamba(x)
    a = a * self.m                      ->    a = _ssmgen_branch(self.mamba, lambda: self.mamba(x), self.m, None)
    b, _ = self.attn(x)
    b = b * self.n
    h = a + b                           ->    b, _ = _ssmgen_branch(self.attn, lambda: self.attn(x), self.n, a); h = b
    self.attn(x=x * self.k)             ->    self.attn(x=_ssmgen_input(self.attn, 'x', x, self.k))

A sum after a call, `h = self.mlp(x)` and `h = r + h`, becomes `h = r + self.mlp(x)`, which `block_sums` changes. A multiplier in a sum,
`h = r + h * self.m`, goes to the end of the branches before it. `ending` and `first` say which layers of a branch can compute all this.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from .roles import plain


def fold(function: ast.FunctionDef) -> None:
    """Changes a forward in place."""
    loads = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    _fold(function.body, loads)


def _fold(body: list[ast.stmt], loads: list[str]) -> None:
    _sink(body)
    at = 0
    while at < len(body):
        statement = body[at]
        if isinstance(statement, ast.If):
            _fold(statement.body, loads)
            _fold(statement.orelse, loads)
        if (name := _of_call(statement)) and isinstance(statement, ast.Assign):
            _branch(statement, name, body, at + 1, loads)
            if at + 1 < len(body) and (residual := _added(statement, body[at + 1])):
                statement.value = ast.BinOp(ast.Name(residual, ast.Load()), ast.Add(), statement.value)
                del body[at + 1]
        at += 1


def _sink(body: list[ast.stmt]) -> None:
    """Moves the multiplication of `h = r + h * self.m` to the assignment of h: of both branches of an `if`."""
    for at in range(len(body) - 1, 0, -1):
        match body[at]:
            case ast.Assign([ast.Name(name)], ast.BinOp(ast.Name(residual), ast.Add(), ast.BinOp(ast.Name(x), ast.Mult(), times))) if (
                name == x != residual and is_attribute(times)
            ):
                before = body[at - 1]
                ends = [before.body, before.orelse] if isinstance(before, ast.If) else []
                multiplied = ast.unparse(ast.Assign([ast.Name(x)], ast.BinOp(ast.Name(x), ast.Mult(), times), lineno=0))
                if _of_call(before) == x:
                    body[at : at + 1] = ast.parse(f"{multiplied}\n{x} = {residual} + {x}").body
                elif ends and all(end and _assigned(end[-1]) == x for end in ends):
                    for end in ends:
                        end += ast.parse(multiplied).body
                    body[at] = ast.parse(f"{x} = {residual} + {x}").body[0]


def _branch(statement: ast.Assign, name: str, body: list[ast.stmt], after: int, loads: list[str]) -> None:
    """Takes the statements from `after` on into the call that assigns to name."""
    call = statement.value
    assert isinstance(call, ast.Call)
    module, times, residual = ast.unparse(call.func), "None", "None"
    inputs = [k for k in call.keywords if isinstance(k.value, ast.BinOp) and _multiplied(k.value)]
    for keyword in inputs:
        x, by = _multiplied(keyword.value)
        keyword.value = ast.parse(f"_ssmgen_input({module}, {keyword.arg!r}, {x}, {by})", mode="eval").body
    if after < len(body):
        match body[after]:
            case ast.Assign([ast.Name(to)], ast.BinOp(ast.Name(x), ast.Mult(), factor)) if to == x == name and is_attribute(factor):
                times = ast.unparse(factor)
                del body[after]
    if times != "None" and after < len(body):
        match body[after]:
            case ast.Assign([ast.Name(to)], ast.BinOp(ast.Name(a), ast.Add(), ast.Name(b))) if name in (a, b) and len({to, a, b}) == 3:
                other = a if b == name else b
                if loads.count(name) == 2 and other not in _targets(statement):
                    residual = other
                    body[after] = ast.parse(f"{to} = {name}").body[0]
    if times != "None" or inputs:
        made = ast.parse(f"_ssmgen_branch({module}, lambda: 0, {times}, {residual})", mode="eval").body
        assert isinstance(made, ast.Call) and isinstance(made.args[1], ast.Lambda)
        made.args[1].body, statement.value = call, made


def _added(call: ast.Assign, statement: ast.stmt) -> str:
    """r of h = r + h, after h = self.name(…); empty for anything else."""
    match call, statement:
        case (
            ast.Assign([ast.Name(h)], ast.Call(func)),
            ast.Assign([ast.Name(to)], ast.BinOp(ast.Name(a), ast.Add(), ast.Name(b))),
        ) if is_attribute(func) and to == h and h in (a, b) and a != b:
            return str(a if b == h else b)
    return ""


def is_attribute(node: ast.expr) -> bool:
    """Whether it is self.name."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _multiplied(node: ast.expr) -> tuple[str, str]:
    """(x, self.name) of x * self.name; nothing of anything else."""
    match node:
        case ast.BinOp(ast.Name(x), ast.Mult(), factor) if is_attribute(factor):
            return x, ast.unparse(factor)
    return "", ""


def _targets(statement: ast.stmt) -> list[str]:
    """The names that an assignment sets."""
    match statement:
        case ast.Assign([ast.Name(name)]):
            return [name]
        case ast.Assign([ast.Tuple(elements)]):
            return [element.id for element in elements if isinstance(element, ast.Name)]
    return []


def _assigned(statement: ast.stmt) -> str:
    """The first name that an assignment sets; empty for anything else."""
    return next(iter(_targets(statement)), "")


def _of_call(statement: ast.stmt) -> str:
    """The first name that gets the result of self.name(…); empty for anything else."""
    match statement:
        case ast.Assign(_, ast.Call(func)) if is_attribute(func):
            return _assigned(statement)
    return ""


@cache
def _text(forward: Any) -> ast.FunctionDef | None:
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return found if isinstance(found, ast.FunctionDef) else None


@cache
def ending(kind: Any) -> str:
    """The layer of a module whose result is the module's, or the first item of it; empty if there is none."""
    function = _text(plain(kind.forward))
    if function is None:
        return ""
    found = ""
    for node in ast.walk(function):
        for _, body in ast.iter_fields(node):
            if not isinstance(body, list):
                continue
            for before, last in zip([None, *body], body, strict=False):
                match before, last:
                    case (ast.Assign([ast.Name(name)], ast.Call(func, [_], [])), ast.Return(ast.Name(given))) if name == given:
                        pass
                    case (
                        ast.Assign([ast.Name(name)], ast.Call(func, [_], [])),
                        ast.Return(ast.Tuple([ast.Name(given), *_])),
                    ) if name == given:
                        pass
                    case (_, ast.Return(ast.Call(func, [_], []))):
                        pass
                    case _:
                        continue
                found = func.attr if isinstance(func, ast.Attribute) and is_attribute(func) else found
    return found if _calls(function, found) == 1 else ""


def _calls(function: ast.FunctionDef, layer: str) -> int:
    """How often the text calls a layer."""
    found = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return sum(isinstance(func, ast.Attribute) and func.attr == layer for func in found)


@cache
def first(kind: Any, parameter: str) -> tuple[str, ...]:
    """The layers of a module that multiply its parameter in every call, if nothing else uses it but its shape; none otherwise."""
    function = _text(plain(kind.forward))
    if function is None:
        return ()
    layers: list[ast.Attribute] = []
    free = uses = 0
    for node in ast.walk(function):
        uses += isinstance(node, ast.Name) and node.id == parameter
        free += isinstance(node, ast.Attribute) and node.attr == "shape" and isinstance(node.value, ast.Name) and node.value.id == parameter
    for node in _always(function):
        match node:
            case ast.Call(ast.Attribute(ast.Name("self")) as layer, [ast.Name(x)], []) if (
                x == parameter and _calls(function, layer.attr) == 1
            ):
                layers.append(layer)
    layers.sort(key=lambda layer: (layer.lineno, layer.col_offset))
    return tuple(layer.attr for layer in layers) if uses == len(layers) + free else ()


_MAYBE = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.BoolOp, ast.Lambda, ast.FunctionDef, ast.comprehension)


def _always(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function that every call evaluates once."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, _MAYBE):
            yield node
            waiting += ast.iter_child_nodes(node)
