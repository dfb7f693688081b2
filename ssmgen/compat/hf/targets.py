"""The functions and forwards that `patch` replaces in a modeling file, and why it leaves one of them alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from . import between, block_sums, copies, functions, lightning, norms, roles
from .functions import FUNCTIONS
from .layers import TABLE, run
from .replacements import Replacement

MIXER = ("hidden_states", "cache", "attention_mask")
"""Roles of the parameters of a mixer's forward."""
Objection = Callable[[Any], str]
"""An attribute of a modeling file -> why it is left alone; empty if it is replaced."""


class Target(NamedTuple):
    """A function, or a class, of a modeling file."""

    name: str
    run: Callable[[Replacement, Callable[..., Any]], Callable[..., Any]]  # makes ours
    objection: Objection
    between: bool = False  # a class whose forward may be wrapped, of which the innermost one is replaced

    def place(self, label: str, module: ModuleType) -> Replacement:
        """Puts ours there."""
        found = getattr(module, self.name)
        if not isinstance(found, type):
            return Replacement(label, module, self.name, self.run)
        return Replacement(label, block_sums.Forward(found) if self.between else found, "forward", self.run)


def targets(module: ModuleType, fuse: bool) -> list[Target]:
    """All that is replaced in a modeling file, or ought to be."""
    layers = [row for name, (_, row) in TABLE.items() if name in vars(module)]
    wanted = functions.expected(vars(module), [name for layer in layers for name in layer.functions])
    found = [Target(name, functions.run_function, partial(_of_function, name)) for name in wanted]
    found += [Target(name, lightning.run, partial(_of_class, lightning.ROLES)) for name in lightning.CLASSES if name in vars(module)]
    if not fuse:
        return found
    mixer = partial(_of_class, MIXER)
    found += [Target(name, partial(run, layer), mixer) for name, layer in copies.mixers(module).items()]
    found += [Target(name, norms.run, norms.objection) for name in norms.classes(module)]
    taken = {target.name for target in found}
    return found + [Target(name, between.run, between.objection, between=True) for name in between.classes(module) if name not in taken]


def _of_function(name: str, original: Any) -> str:
    if original is None:
        return "this version of transformers does not have it"
    differences = functions.unknown_parameters(FUNCTIONS[name], original)
    return f"its parameters differ from the expected ones: {', '.join(differences)}" if differences else ""


def _of_class(wanted: tuple[str, ...], owner: Any) -> str:
    return roles.objection(owner, *wanted)
