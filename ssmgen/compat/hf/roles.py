"""Parameters of transformers' forwards by role: a role keeps its name here while transformers renames the parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

ALIASES = {"cache": ("cache", "cache_params", "past_key_values")}
"""Names that a parameter goes by, newest first. transformers 5.24 renamed the two older ones of the cache."""


def names_of(role: str) -> tuple[str, ...]:
    """Names of a role's parameter; a role that is not listed has its own."""
    return ALIASES.get(role, (role,))


def name_in(role: str, names: Mapping[str, Any]) -> str | None:
    """The name that the role goes by among these, of parameters or of a model's output; None for none of its names."""
    return next((name for name in names_of(role) if name in names), None)


def plain(forward: Any) -> Any:
    """A function without its decorators and patches. Decorators of transformers 5.15 do not set __wrapped__."""
    forward = inspect.unwrap(forward)
    kinds = [p.kind for p in inspect.signature(forward).parameters.values()]
    if inspect.isfunction(forward) and kinds[1:] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        inner = [cell.cell_contents for cell in forward.__closure__ or () if inspect.isfunction(cell.cell_contents)]
        return plain(inner[0]) if len(inner) == 1 else forward
    return forward


class Roles:
    """Finds the arguments of a forward by role, given by position or by keyword.

    Calling it gives one value per role, None for a role that is not given, and a dict of all other arguments by name.
    """

    def __init__(self, forward: Callable[..., Any], *roles: str):
        parameters = inspect.signature(plain(forward)).parameters
        self._named = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]  # no self
        self._names = [names_of(role) for role in roles]
        known = {name for names in self._names for name in names}
        self._defaults = {name: parameters[name].default for name in self._named if name not in known}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        others = dict(zip(self._named, args, strict=False)) | kwargs
        values = []
        for names in self._names:
            value = None
            for name in names:
                given = others.pop(name, None)
                value = given if value is None else value
            values.append(value)
        return (*values, others)

    def unknown(self, others: Mapping[str, Any]) -> bool:
        """Whether a named parameter without a role is given another value than its default: our function cannot know its meaning."""
        return any(others.get(name, default) is not default for name, default in self._defaults.items())


def objection(owner: Any, *roles: str, more: bool = True) -> str:
    """Why the forward of a class cannot be replaced by one with these roles, in words; empty if it can.

    more: it may have other parameters, with defaults. Their values are None, or transformers passes them to all layers
    """
    parameters = inspect.signature(plain(owner.forward)).parameters
    found = list(parameters)
    missing = [role for role in roles if name_in(role, parameters) is None]
    known = {"self", *(name for role in roles for name in names_of(role))}
    others = [p for name, p in parameters.items() if name not in known]
    needed = [p for p in others if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if missing or needed or (others and not more):
        return f"its forward takes {', '.join(found)}, not {', '.join(('self', *roles))}"
    return ""
