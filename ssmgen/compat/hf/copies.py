"""Mixers of modeling files that are replaced whole: listed classes, and copies of them.

transformers copies a layer into the files of other models, under another class's name. A copy is recognised by its source: its methods, the
functions that they call, and the methods of the gates that it makes equal the listed class's word for word, except annotations.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from . import found, texts
from .functions import FUNCTIONS
from .layers import TABLE, Layer
from .roles import plain


@cache
def mixers(modeling: ModuleType) -> dict[str, Layer]:
    """{class of the modeling file: how it is computed}"""
    return {name: layer for name, c in _with_forward(modeling).items() if (layer := layer_of(c)) is not None}


def layer_of(mixer: Any) -> Layer | None:
    """How mixers of a class are computed; None for a class that is none of them."""
    if mixer.__name__ in TABLE:
        return TABLE[mixer.__name__][1]
    calls = _names(mixer.forward)
    for name, (model, layer) in TABLE.items():
        if set(layer.functions) <= calls and (listed := getattr(found.modeling(model), name, None)) is not None and same(mixer, listed):
            return layer
    return None


@cache
def callers(modeling: ModuleType) -> tuple[str, ...]:
    """Classes of the modeling file whose forward calls a function that ssmgen has for it."""
    return tuple(name for name, c in _with_forward(modeling).items() if _names(c.forward) & FUNCTIONS.keys())


def _with_forward(modeling: ModuleType) -> dict[str, Any]:
    return {name: c for name, c in texts.own_modules(modeling).items() if "forward" in vars(c)}


def _names(function: Any) -> frozenset[str]:
    """Names that a function looks up: of globals and attributes."""
    code = getattr(plain(function), "__code__", None)
    return frozenset(() if code is None else code.co_names)


def same(one: Any, other: Any) -> bool:
    """Whether two classes compute the same, by the text of the functions that they call. Gated norms are compared on numbers instead."""
    methods, others = (_methods(c) for c in (one, other))
    if methods is None or methods != others:
        return False
    for name in _names(one.forward) - FUNCTIONS.keys():
        mine, theirs = (vars(inspect.getmodule(c)).get(name) for c in (one, other))
        if inspect.isfunction(mine) and (not inspect.isfunction(theirs) or _text(mine) != _text(theirs)):
            return False
    mine, theirs = _parts(one), _parts(other)
    return mine.keys() == theirs.keys() and all(_methods(mine[part]) == _methods(theirs[part]) for part in mine)


def _methods(owner: Any) -> dict[str, str] | None:
    """The text of a class's methods by name, except its constructors; None without source."""
    methods = {n: f for n, f in vars(owner).items() if inspect.isfunction(f) and not n.startswith(("__init__", "init_"))}
    found = {name: _text(method) for name, method in methods.items()}
    return None if None in found.values() else {name: str(text) for name, text in found.items()}


@cache
def _text(function: Callable[..., Any]) -> str | None:
    """A function's source without annotations, decorators and documentation; None where there is none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain(function))))
    except (OSError, TypeError):
        return None
    return ast.dump(texts.Bare().visit(tree))


def _parts(owner: Any) -> dict[str, Any]:
    """{attribute: its class} of the instances of transformers' classes that a class makes, except gated norms."""
    held = vars(inspect.getmodule(owner))
    source = ast.parse(textwrap.dedent(inspect.getsource(plain(owner.__init__))))
    made = {}
    for node in ast.walk(source):
        match node:
            case ast.Assign(targets=[ast.Attribute(ast.Name("self"), attribute)], value=ast.Call(ast.Name(name))):
                made[attribute] = held.get(name)
    return {
        attribute: c
        for attribute, c in made.items()
        if isinstance(c, type) and c.__module__.startswith("transformers.") and not c.__name__.endswith("RMSNormGated")
    }
