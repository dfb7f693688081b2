"""Models whose code comes with their checkpoint (`trust_remote_code`): finds their functions that ssmgen can replace, by the values
that are bound in the checkpoint's module.

Such code is a modeling file of an older transformers, or like one: it has functions of transformers' names and parameters, or imports them
from there, or from mamba-ssm, causal-conv1d or flash-linear-attention. Some of it keeps them in its layers when these are made.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch

from . import functions, replacements

# Names that older modeling files have for a function of FUNCTIONS.
_OLDER = {"torch_causal_conv1d_update": "causal_conv1d_update"}
# Packages, and where their functions are here, under their names.
_PACKAGES = {p: f"ssmgen.compat.{p}" for p in ("mamba_ssm", "causal_conv1d", "fla")}
_NOT_THEIRS = ("torch", "transformers", "builtins", "ssmgen")


def modules_of(model: torch.nn.Module) -> list[ModuleType]:
    """The modules that define the classes of a model's layers, except modules of _NOT_THEIRS."""
    names = {c.__module__: None for layer in model.modules() for c in type(layer).__mro__}
    return [sys.modules[n] for n in names if n in sys.modules and n.partition(".")[0] not in _NOT_THEIRS]


def bound(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """{name in the module: ours} of the functions there that ssmgen has, of the parameters that ours take."""
    found = {name: (value, ours_of(name, value)) for name, value in vars(module).items() if isinstance(value, FunctionType)}
    return {name: ours for name, (value, ours) in found.items() if ours is not None and not functions.unknown_parameters(ours, value)}


def ours_of(name: str, value: FunctionType) -> Callable[..., Any] | None:
    """Ours for a function that goes by this name: by the package that it comes from, or by transformers' name of it; None for none."""
    value = getattr(value, "__wrapped__", value) if getattr(value, "__module__", "").startswith("ssmgen.") else value
    package = value.__module__.partition(".")[0]
    if package in _PACKAGES:
        return getattr(importlib.import_module(_PACKAGES[package]), value.__name__, None)
    known = functions.FUNCTIONS.get(value.__name__) or functions.FUNCTIONS.get(name)
    return known or functions.FUNCTIONS.get(_OLDER.get(value.__name__, ""))


def missing(model: torch.nn.Module) -> str:
    """One sentence: why nothing in an unknown model is replaced."""
    name, modules = type(model).__name__, modules_of(model)
    if not modules:
        return f"{name} has no layer of a known model"
    where = ", ".join(m.__name__ for m in modules)
    absent = sorted({n for m in modules for n, v in vars(m).items() if v is None and n in _of_packages()})
    because = f"; {', '.join(absent)} is None there, because its package is not installed" if absent else ""
    return f"{name} has no layer of a known model, and {where} binds no function with the name and parameters of a known one{because}"


def _of_packages() -> set[str]:
    return {n for path in _PACKAGES.values() for n, v in vars(importlib.import_module(path)).items() if callable(v)}


class Replacement(replacements.Replacement):
    """The replacement of a function in a checkpoint's module, and in the layers that keep it."""

    def __init__(self, module: ModuleType, name: str, ours: Callable[..., Any]):
        super().__init__(f"{module.__name__}.{name}", module, name, partial(_run, ours))
        self.kept_in: list[tuple[weakref.ref[torch.nn.Module], str]] = []

    def rebind(self, model: torch.nn.Module) -> None:
        """Puts ours into the layers that hold the original."""
        for layer, attribute in _holding(model, self.original):
            setattr(layer, attribute, self.run)
            self.kept_in.append((weakref.ref(layer), attribute))

    def restore(self) -> None:
        super().restore()
        for reference, attribute in self.kept_in:
            layer = reference()
            if layer is not None and vars(layer).get(attribute) is self.run:
                setattr(layer, attribute, self.original)


def _run(ours: Callable[..., Any], replacement: replacements.Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
    return functions.run_function(replacement, original, ours)


def _holding(model: torch.nn.Module, function: Callable[..., Any]) -> Iterator[tuple[torch.nn.Module, str]]:
    """(layer, attribute) wherever a layer holds the function itself."""
    for layer in model.modules():
        yield from [(layer, name) for name, value in vars(layer).items() if value is function]
