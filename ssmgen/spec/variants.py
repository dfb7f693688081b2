"""Variants of a problem: specs that have its fields, and choices in addition. Families' rules and spaces make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import product
from typing import Any, TypeVar

from .kernel import Arch, KernelSpec

S = TypeVar("S", bound=KernelSpec)


def spec_of(kind: Callable[..., S], problem: Any, **how: Any) -> S:
    """The variant with these choices. kind: makes it; a spec class that derives from the problem's class, for example."""
    return kind(**{f.name: getattr(problem, f.name) for f in fields(problem)}, **how)


def legal(specs: Iterable[S], arch: Arch) -> Iterator[S]:
    return (spec for spec in specs if not spec.violations(arch))


def trials(kind: Callable[..., S], problem: Any, arch: Arch, axes: Mapping[str, Any], **fixed: Any) -> Iterator[S]:
    """The legal variants with every combination of the choices in `axes`; the last one changes first. fixed: choices of all variants."""
    hows = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return legal((spec_of(kind, problem, **fixed, **how) for how in hows), arch)
