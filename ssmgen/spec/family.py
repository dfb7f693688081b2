"""Family records: one for each package in `ssmgen/families/`, found by scanning that folder.

All lists of families come from these records: operators, specs by name, public names, sharding rules, checks, benchmarks, models,
default variants, pages. A record names its parts by *place*, `module:name` within the family's package. A part is imported when it is first
used, so that reading all records imports neither torch nor CUDA.
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
    """The kernels of one spec class, which has its own family name in the texts of specs.

    spec: place of the class. problem: place of the Problem of its calls. Kernels without a problem are parts of others, or tools.
    rules: module of the operator, with `space` and `candidates` for the registry; by default the spec's own module.
    unchecked: why they have no trial, in words.
    parts: {name in spec texts of kernels that are parts of others: why they have no trial}
    old_names: {earlier name in texts of specs, tuned tables and command lines: the fields that those texts leave out}
    """

    spec: str
    problem: str | None = None
    rules: str | None = None
    unchecked: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    old_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's record. `name` is its package's name. A family lacks every part whose field is not given."""

    name: str
    kernels: tuple[Kernels, ...]
    launches: Mapping[str, str] = field(default_factory=dict)  # kernel of ssmgen.engine that its calls launch too -> its part of a problem
    functions: Mapping[str, str] = field(default_factory=dict)  # public name -> place
    types: Mapping[str, str] = field(default_factory=dict)  # argument types: public name -> place
    helpers: Mapping[str, str] = field(default_factory=dict)  # functions that compute required arguments: public name -> place
    sharding: str | None = None  # place of {public name: Rule}
    context: str | None = None  # place of {public name: Context}, of functions whose sequences may be split over ranks
    trials: str | None = None  # place of {spec class: function that makes a Trial}
    bench: Mapping[str, str] = field(default_factory=dict)  # name of a benchmark -> place of its Bench
    copies: str | None = None  # place of the function that makes the copies used as the benchmarks' reference; one family has it
    models: str | None = None  # place of {kind of a model: its class}
    asks: str | None = None  # place of {operator: the problems that models have for it}
    defaults: str | None = None  # place of {name: Default}, the variants with committed texts
    page: str | None = None  # of docs/

    def part(self, place: str) -> Any:
        """The object at a place of the family's package. Raises ImportError, AttributeError."""
        module, _, name = place.partition(":")
        found = importlib.import_module(f"{PACKAGE}.{self.name}.{module}")
        return getattr(found, name) if name else found

    def variants_of(self, problem: type) -> list[str]:
        """First words of spec texts whose variants serve a problem's calls: classes that derive from it, without parts of other kernels."""
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


@functools.cache
def parts(field: str) -> dict[Any, Any]:
    """Merges one field of all records: `sharding`, `context`, `trials`, `models`, `asks` or `defaults`. The first call imports them."""
    found: dict[Any, Any] = {}
    for family in records():
        if place := getattr(family, field):
            found |= family.part(place)
    return found
