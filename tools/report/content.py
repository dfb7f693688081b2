"""Contents of the pages: variants, compiled and disassembled, the calls that they serve, and their measurements."""

from __future__ import annotations

import functools
import inspect as introspection
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ssmgen.cache.entry import Entry
from ssmgen.cache.store import Cache
from ssmgen.compile import nvrtc
from ssmgen.errors import SpecError, UnknownArchError
from ssmgen.select import registry
from ssmgen.select import tuned as table
from ssmgen.select.catalog import OPERATOR_OF, OPERATORS, SPECS, parse
from ssmgen.select.model_variants import problems_by_models
from ssmgen.spec.kernel import SM90, Arch, DType, KernelSpec, Problem, entries
from ssmgen.variants import inspect
from ssmgen.variants.build import Built, build
from ssmgen.variants.defaults import words
from ssmgen.variants.generate import default_variants

from . import ReportError
from .benchmarks import Timing

TUNED = "tuned"  # the registry's word for a measured choice, followed by its size if that differs
NEIGHBOURS = 4  # variants that a page proposes for comparison


@dataclass(frozen=True, slots=True)
class Choice:
    """Calls that a variant serves: calls of some models, with sizes from `first` to `last`."""

    models: tuple[str, ...]
    problem: str
    pdl: bool  # whether the caller lets it overlap the end of the previous kernel
    unit: str  # the unit of a size
    first: int
    last: int | None  # None: the same for all larger sizes
    rule: str
    gpu: str | None  # the GPU where it was measured as the best; None: chosen by rules, without a measurement

    @property
    def sizes(self) -> str:
        if self.last is None:
            return f"{self.first:,} and more" if self.first > 1 else "any"
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"


@dataclass(frozen=True, slots=True)
class Calls:
    """One kind of call of some models, and the variant that serves it at each size."""

    models: tuple[str, ...]
    arch: Arch
    problem: str  # its fields that differ from its family's defaults
    served: tuple[tuple[Choice, KernelSpec], ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """The contents of a variant's page."""

    spec: KernelSpec
    arch: Arch
    entry: Entry
    ptx: str
    sass: str | None
    no_sass: str  # reason for a missing one
    no_occupancy: str
    numbers: Mapping[str, Any]  # of its residency and its SASS
    choices: Sequence[Choice] = ()
    timings: Sequence[Timing] = ()

    @property
    def key(self) -> str:
        return f"{self.arch}/{self.spec.name}"

    @property
    def models(self) -> list[str]:
        """The models that this variant serves at some size."""
        return sorted({name for choice in self.choices for name in choice.models})

    @property
    def said(self) -> dict[str, str]:
        """{field: value}, as in its text."""
        return dict(item.split("=", 1) for item in self.spec.said())

    def rows(self, of_problem: bool) -> list[tuple[str, str, str]]:
        """(field, value, meaning) of the fields that the call fixes, or of the fields that this variant chooses."""
        fixed, meaning = _problem_fields(type(self.spec)), meanings(type(self.spec))
        return [(name, value, meaning.get(name, "")) for name, value in self.said.items() if (name in fixed) is of_problem]

    def changes(self, other: Variant) -> list[tuple[str, str, str]]:
        """(field, value here, value there)"""
        here, there = self.said, other.said
        names = dict.fromkeys([*here, *there])
        return [(n, here.get(n, "-"), there.get(n, "-")) for n in names if here.get(n) != there.get(n)]

    def neighbours(self, others: Sequence[Variant]) -> list[Variant]:
        """The variants of the same family and architecture that differ from this one in the fewest fields."""
        like = [o for o in others if o.spec.kind == self.spec.kind and o.arch == self.arch and o is not self]
        return sorted(like, key=lambda o: (len(self.changes(o)), o.spec.name))[:NEIGHBOURS]


@dataclass(frozen=True, slots=True)
class Family:
    """An operator family with its variants in the report."""

    name: str
    paragraphs: list[tuple[str, str]]  # ("p" or "pre", text)
    calls: list[Calls]
    variants: list[Variant] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """A short description of its computation."""
        return self.paragraphs[0][1].removeprefix(f"{self.name}: ")


def gather(
    archs: Sequence[Arch], timings: Mapping[str, Sequence[Timing]], cache: Cache, jobs: int | None, done: Callable[[int], None]
) -> list[Variant]:
    """The default variants and the timed ones. For each compiled variant, `done` gets the total number of variants.

    Raises ReportError that names every variant that does not compile.
    """
    work = dict.fromkeys([*default_variants(archs), *_timed(timings, archs)])
    built = build(list(work), cache, jobs, max_spill=sys.maxsize, done=lambda _: done(len(work)))
    if failed := [f"{b.spec}: {b.error}" for b in built if b.error]:
        raise ReportError(failed)
    served = {arch: choices(arch) for arch in archs}

    def one(b: Built) -> Variant:
        told = {"choices": served[b.arch].get(b.spec, ()), "timings": timings.get(str(b.spec), ())}
        return _variant(b.spec, b.arch, b.entry, told)

    with ThreadPoolExecutor(jobs) as pool:
        return sorted(pool.map(one, built), key=lambda v: (v.spec.kind, v.arch, v.spec.name))


def _timed(timings: Mapping[str, Sequence[Timing]], archs: Sequence[Arch]) -> list[tuple[KernelSpec, Arch]]:
    specs, problems = [], []
    for text in timings:
        try:
            specs.append(parse(text))
        except SpecError as e:
            problems.append(f"{timings[text][0].run.op}'s benchmark is of another release: {e}")
    if problems:
        raise ReportError(problems)
    return [(spec, arch) for spec in specs for arch in archs if not spec.violations(arch)]


def _variant(spec: KernelSpec, arch: Arch, entry: Entry, told: Mapping[str, Any]) -> Variant:
    numbers: dict[str, Any] = {}
    listing, no_sass, no_occupancy = None, "", ""
    try:
        numbers |= inspect.residency(spec, arch, entry)
    except UnknownArchError as e:
        no_occupancy = str(e)
    try:
        listing = inspect.sass(entry.cubin)
        numbers |= inspect.sass_summary(listing)
    except inspect.DisassemblerMissingError as e:
        no_sass = str(e)
    ptx = nvrtc.compile_ptx(entry.source, arch, str(spec))
    return Variant(spec, arch, entry, ptx, listing, no_sass, no_occupancy, numbers, **told)


def choices(arch: Arch) -> dict[KernelSpec, list[Choice]]:
    """The variants that `ssmgen build --all --replay 6` would build, with states of every type: {variant: the models and sizes it
    serves}."""
    found: dict[KernelSpec, list[Choice]] = {}
    for problem, names in problems_by_models(tuple(DType)).items():
        for pdl in (True, False) if arch >= SM90 else (False,):
            for choice, spec in _served(problem, names, arch, pdl):
                for part in spec.kernels:
                    found.setdefault(part, []).append(choice)
    return found


def calls(arch: Arch) -> dict[str, list[Calls]]:
    """{operator: calls of the models, with states of their own type; calls may overlap the previous kernel if the architecture can}"""
    found: dict[str, list[Calls]] = {}
    for problem, names in problems_by_models().items():
        text = words(problem)
        served = tuple(_served(problem, names, arch, arch >= SM90))
        found.setdefault(OPERATOR_OF[type(problem)], []).append(Calls(served[0][0].models, arch, text, served))
    return found


def _served(problem: Problem, names: Sequence[str], arch: Arch, pdl: bool) -> Iterator[tuple[Choice, KernelSpec]]:
    """The variants for a problem: first by the rules, then by the measurements on each GPU, which take precedence there."""
    operator = OPERATOR_OF[type(problem)]
    largest = getattr(OPERATORS[operator], "MAX_SIZE", 1024)
    told = tuple(dict.fromkeys(names)), registry.describe(problem), pdl, registry.unit(operator)
    for gpu in (None, *table.gpus(arch)):
        ranges = registry.ranges(operator, problem, arch, pdl, largest, gpu)
        for (rule, spec), group in groupby(ranges, lambda found: (_word(found[2].rule), found[2].spec)):
            (first, last, _), *more = group
            last = more[-1][1] if more else last
            if gpu is None or rule == TUNED:
                yield Choice(*told, first, None if last == largest else last, rule, gpu), spec


def _word(rule: str) -> str:
    """Shortens the rule of a row that was measured at this size or near it: the table shows the size."""
    return TUNED if rule.startswith(TUNED) else rule


def families(variants: Sequence[Variant], archs: Sequence[Arch]) -> list[Family]:
    """The families that have variants, in the order of SPECS."""
    by_arch = [calls(arch) for arch in archs]
    found = {}
    for name, cls in SPECS.items():
        text = sys.modules[cls.__module__].__doc__ or name
        found[name] = Family(name, paragraphs(text), [call for told in by_arch for call in told.get(name, ())])
    for variant in variants:
        found[variant.spec.kind].variants.append(variant)
    return [family for family in found.values() if family.variants]


def paragraphs(text: str) -> list[tuple[str, str]]:
    """The paragraphs of a docstring, as ("p", text) or, if indented, as ("pre", text)."""
    found = []
    for part in re.split(r"\n\s*\n", introspection.cleandoc(text)):
        indented = all(line.startswith("    ") for line in part.splitlines())
        found.append(("pre", part) if indented else ("p", " ".join(part.split())))
    return found


@functools.cache
def _problem_fields(cls: type[KernelSpec]) -> frozenset[str]:
    posed = [problem for problem in OPERATOR_OF if issubclass(cls, problem)]
    return frozenset(name for problem in posed for name in entries(problem))


@functools.cache
def meanings(cls: type[KernelSpec]) -> dict[str, str]:
    """{field: the comment after it}, for fields with a comment."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ != object.__module__:
            found |= re.findall(r"^    (\w+): [^\n#]*  # ([^\n]+)$", introspection.getsource(base), re.MULTILINE)
    for name, entry in entries(cls).items():
        if entry.part and (said := meanings(type(cls.__dataclass_fields__[entry.part].default)).get(entry.field.name)):
            found[name] = said
    return {name: said for name, said in found.items() if name in entries(cls)}
