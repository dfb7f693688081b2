"""Kernel packages that transformers calls, if installed, instead of its PyTorch functions.

A modeling file looks for mamba-ssm, causal-conv1d and flash-linear-attention when it is imported. If a package cannot be imported, the file
silently uses its PyTorch function. Only the functions in the file show which one it calls; the list of installed packages does not.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

PACKAGES = "packages"


class Bound(NamedTuple):
    """A function of a modeling file that calls a package's function: its place, the package's function and transformers' own one."""

    module: ModuleType
    name: str
    package: Callable[..., Any]
    own: Callable[..., Any]

    @property
    def words(self) -> str:
        """Such as "mamba2.causal_conv1d_fn: causal_conv1d.causal_conv1d_interface.causal_conv1d_fn"."""
        return f"{self.module.__name__.split('.')[-2]}.{self.name}: {self.package.__module__}.{self.package.__qualname__}"


def bound(model: torch.nn.Module) -> list[Bound]:
    """The functions of the model's modeling files that call a package; empty if transformers calls none."""
    names = {c.__module__ for layer in model.modules() for c in type(layer).__mro__}
    modules = [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]
    found = []
    for module in modules:
        for name, function in vars(module).items():
            if not isinstance(function, FunctionType):
                continue
            package, own = inspect.getclosurevars(function).nonlocals.get("implementation"), getattr(function, "__wrapped__", None)
            if callable(package) and own is not None and package is not own:
                found.append(Bound(module, name, package, own))
    return found


@contextlib.contextmanager
def own_functions(model: torch.nn.Module) -> Iterator[None]:
    """Makes the model's modeling files call transformers' own PyTorch functions inside the block."""
    replaced = [(b.module, b.name, getattr(b.module, b.name)) for b in bound(model)]
    try:
        for module, name, function in replaced:
            setattr(module, name, function.__wrapped__)
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)
