"""Family records: one for each package of `ssmgen/families/`, found by looking there.

Whatever lists families asks these records: operators, specs by name, public names, sharding rules, checks, benchmarks, tuning, models,
default variants, pages. A record names its parts by *place*, `module:name` within the family's package. A part is imported when it is first
asked for, so that reading all records imports neither torch nor CUDA.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PACKAGE = "ssmgen.families"


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one spec class, which has a family name of its own in texts of specs.

    spec: place of the class. problem: place of the Problem that calls pose. Kernels without a problem are parts of others, or tools.
    rules: module of the operator, with `space` and `candidates`, which the registry asks; the spec's own module if it is not given.
    unchecked: why they have no trial, in words.
    parts: {name in texts of those of the class that are parts of others: why they have no trial}
    old_names: that texts of specs, tuned tables and command lines may still have, with the fields of a spec that go without saying there.
    """

    spec: str
    problem: str | None = None
    rules: str | None = None
    unchecked: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    old_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the project knows of a family. `name` is its package's; all else that is not given, it does not have."""

    name: str
    kernels: tuple[Kernels, ...]
    functions: Mapping[str, str] = field(default_factory=dict)  # public name -> place
    types: Mapping[str, str] = field(default_factory=dict)  # of arguments: public name -> place
    helpers: Mapping[str, str] = field(default_factory=dict)  # functions that say what arguments must be: public name -> place
    sharding: str | None = None  # place of {public name: Rule}
    context: str | None = None  # place of {public name: Context}, of functions whose sequences may lie on several ranks
    trials: str | None = None  # place of {spec class: what makes a Trial}
    bench: Mapping[str, str] = field(default_factory=dict)  # name of a benchmark -> place of its Bench
    copies: str | None = None  # place of what makes the copies that benchmarks are measured against; of one family
    tuning: str | None = None  # place of {operator: what makes cases to tune}
    models: str | None = None  # place of {kind of a model: its class}
    asks: str | None = None  # place of {operator: what models ask of it}
    defaults: str | None = None  # place of {name: Default}, the variants whose text is committed
    page: str | None = None  # of docs/

    def part(self, place: str) -> Any:
        """What stands at a place of the family's package. Raises ImportError, AttributeError."""
        module, _, name = place.partition(":")
        found = importlib.import_module(f"{PACKAGE}.{self.name}.{module}")
        return getattr(found, name) if name else found

    def variants_of(self, problem: type) -> list[str]:
        """Names that texts of specs begin with which serve a problem's calls: of classes that derive from it, and no parts of others."""
        checked = [(self.part(kernels.spec), kernels.parts) for kernels in self.kernels if not kernels.unchecked]
        return [kind for spec, parts in checked if issubclass(spec, problem) for kind in spec.kinds() if kind not in parts]


@functools.cache
def records() -> tuple[Family, ...]:
    """All families, in the order of their names."""
    names = sorted(found.name for found in pkgutil.iter_modules(importlib.import_module(PACKAGE).__path__))
    return tuple(importlib.import_module(f"{PACKAGE}.{name}").FAMILY for name in names)


@functools.cache
def public_names() -> dict[str, tuple[Family, str]]:
    """{public name: (its family, place)}"""
    named = [(family, {**family.functions, **family.types, **family.helpers}) for family in records()]
    return {name: (family, place) for family, places in named for name, place in places.items()}


def parts(field: str) -> dict[Any, Any]:
    """What all records have in one of these fields, in one: `sharding`, `context`, `trials`, `tuning`, `models`, `asks` or `defaults`."""
    found: dict[Any, Any] = {}
    for family in records():
        if place := getattr(family, field):
            found |= family.part(place)
    return found
