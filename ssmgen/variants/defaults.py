"""Default variants: their kernels are committed as text, so that a review shows how the CUDA changed.

A family's `defaults.py` names them, `DEFAULTS = {name: Default or FixedSpec}`. They cover every branch of its templates that a supported
model uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..engine.layers.problem import Layer
from ..engine.window import StateLayout
from ..select import registry
from ..select.catalog import OPERATOR_OF
from ..select.model_variants import specs_for
from ..select.models import find_model
from ..spec.family import records
from ..spec.kernel import SM90, Arch, DType, Index, KernelSpec, Pdl, Problem, entries, text_of

FIRST = Arch(80)


@dataclass(frozen=True, slots=True)
class Default:
    """A problem and a call size (see `registry.unit`); without a size: the variants of all sizes.

    since: the first architecture that supports it.
    """

    problem: Problem
    size: int | None = None
    since: Arch = FIRST
    only: tuple[Arch, ...] = ()

    def specs(self, arch: Arch) -> list[KernelSpec]:
        """The kernels that serve it, with programmatic dependent launch if the architecture has it; empty before `since`."""
        if arch < self.since or (self.only and arch not in self.only):
            return []
        if self.size is None:
            return specs_for([self.problem], arch, pdl=(True,))
        return list(registry.select(OPERATOR_OF[type(self.problem)], self.problem, self.size, arch, arch >= SM90).kernels)


@dataclass(frozen=True, slots=True)
class FixedSpec:
    """A variant that the registry chooses for no call. Its `pdl` is switched off on architectures without it.

    since, until: the first and the last architecture for which it is listed; without `until`, all later ones.
    """

    spec: KernelSpec
    since: Arch = FIRST
    until: Arch | None = None

    def specs(self, arch: Arch) -> list[KernelSpec]:
        if arch < self.since or (self.until and arch > self.until):
            return []
        spec: Any = self.spec  # `pdl` is a field of every spec, but not of a base class
        chosen: KernelSpec = spec if arch >= SM90 else replace(spec, pdl=Pdl.OFF)
        return list(chosen.kernels)


def named() -> Iterator[tuple[str, str, Default | FixedSpec]]:
    """(family, name, default) of all."""
    for family in records():
        if family.defaults:
            yield from ((family.name, name, default) for name, default in family.part(family.defaults).items())


def layer(
    model: str, state: DType, index: Index = Index.I32, window: tuple[StateLayout, int] = (StateLayout.RUNS, 3), tp: int = 1, **call: Any
) -> Problem:
    """The problem of a decode step of a model's whole layer, with windows of this layout and length. call: as in `Model.layers`."""
    asked = find_model(model).divided(tp).layers((state,), (index,), **call)
    return next(p for p in asked if isinstance(p, Layer) and (p.conv.layout, p.conv.len) == window)


def words(problem: Problem) -> str:
    """The fields of a problem that are not their defaults, for a name."""
    given = ((name, entry.of(problem), entry.field.default) for name, entry in entries(type(problem)).items())
    return " ".join(f"{name}={text_of(value)}" for name, value, default in given if value != default)
