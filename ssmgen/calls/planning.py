"""Takes a call's operands to its launch: check, problem, choice, launch. `fast_path.py` calls it once per form of call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import ArgumentError, SsmgenError
from ..launch import runtime
from ..select import registry
from ..spec.arguments import Value
from ..spec.kernel import SM90, KernelSpec
from . import checks, fakes
from .naming import spoken

Views = Mapping[str, Tensor]


def is_memory(kind: type) -> bool:
    """Whether a tensor of this type is fully described by its memory. True for subclasses that override functions but not operators."""
    return kind in (Tensor, Parameter) or (issubclass(kind, Tensor) and kind.__torch_dispatch__ == Tensor.__torch_dispatch__)


class Family(NamedTuple):
    """The functions of an operator family that planning calls. `options` is a call's arguments that are not tensors; only the family reads
    them."""

    operator: str
    written: tuple[str, ...]  # operands that a kernel may write
    problem_of: Callable[[Views, Mapping[str, int], Any], Any]  # of views and the addresses of operands
    size_of: Callable[[Views], int]  # the size that the rules look at; 0 if there is nothing to do
    grid_of: Callable[[Any, Views], int]  # blocks of a spec's launch
    values_of: Callable[[Any, Views, Any], Mapping[str, Value]]  # at least all kernel arguments that are not pointers
    # (written, read, unless...): the first two may be the same memory, element by element, if no operand in `unless` is given
    in_place: tuple[tuple[str, ...], ...] = ()


def check_overlap(family: Family, name: str, layout: Views, where: Mapping[str, int], words: Mapping[str, str] = {}) -> None:
    """Raises ArgumentError if a written operand shares memory with another operand. words: as in Caller."""
    overlap_check(family, name, layout, words)(where)


def overlap_check(family: Family, name: str, layout: Views, words: Mapping[str, str] = {}) -> Callable[[Mapping[str, int]], None]:
    """A check of addresses for operands with this layout. It raises ArgumentError as check_overlap does."""
    extents, paged = {n: checks.extent(t) for n, t in layout.items()}, {n: checks.pages(t) for n, t in layout.items()}
    allowed = [(a, b) for a, b, *unless in family.in_place if not any(name in layout for name in unless)]
    pairs = [(a, b) for a, b in allowed if a in layout and b in layout and _alike(layout[a], layout[b])]

    def check(where: Mapping[str, int]) -> None:
        ranges = {n: (p, p + extents[n]) for n, p in where.items()}
        written = {n: ranges[n] for n in family.written if n in ranges}
        read = {n: r for n, r in ranges.items() if n not in written}
        for target, source in pairs:
            if target in written and source in read and where[target] == where[source]:
                del read[source]
        problems: list[str] = []
        checks.check_overlap(written, read, problems, paged)
        if problems:
            raise ArgumentError(name, spoken(problems, words))

    return check


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether equal indices address the same element of both, when both begin at one address."""
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def grid_of(family: Family, name: str, spec: KernelSpec, views: Views) -> int:
    """The number of blocks of a variant's launch. Raises ArgumentError if a launch cannot have that many."""
    grid = family.grid_of(spec, views)
    if grid >= 2**31:
        raise ArgumentError(name, [f"this call needs {grid} blocks; expected fewer than 2^31. Split the batch."])
    return grid


def launch_of(
    family: Family, name: str, spec: KernelSpec, views: Views, names: Sequence[str], options: Any, device: int
) -> runtime.Launch | runtime.Chain:
    """The launch of a variant, or a chain of launches if it has several kernels. It takes pointers in the order of `names`."""

    def one(part: KernelSpec) -> runtime.Launch:
        kernel = runtime.load(part, device, name)
        return runtime.Launch(kernel, device, grid_of(family, name, part, views), family.values_of(part, views, options))

    parts = spec.kernels
    takes = [[names.index(n) for n in part.operands()] for part in parts]
    launches = [one(part) for part in parts]
    return launches[0] if takes == [[*range(len(names))]] else runtime.Chain(launches, takes)


def nothing() -> None:
    """The plan of a call without work: it launches nothing."""


Resolve = Callable[[tuple[int, ...]], "runtime.Launch | runtime.Chain | None"]


def resolving(caller: Caller, named: Views, options: Any, pdl: bool | None, objections: Sequence[str] = ()) -> Resolve:
    """Checks a call on the device, and returns a function from its operands' pointers, in the order of `named`, to the launch.

    Overlap and alignment depend on the pointers: that function checks overlap, and alignment affects the choice. Raises ArgumentError.
    """
    views = caller.checked(named, options, pdl, objections)
    family, name, names = caller.family, caller.name, tuple(named)
    device = next(iter(views.values())).device.index
    arch = runtime.device_arch(device)
    wanted = arch >= SM90 if pdl is None else pdl
    size = family.size_of(views)
    layout = {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for n, t in views.items()}
    launches: dict[Any, runtime.Launch | runtime.Chain] = {}  # alignment is part of the problem
    check = overlap_check(family, name, layout, caller.words)

    def resolve(pointers: tuple[int, ...]) -> runtime.Launch | runtime.Chain | None:
        where = dict(zip(names, pointers, strict=True))
        check(where)
        if size == 0:
            return None
        problem = family.problem_of(layout, where, options)
        if problem not in launches:
            spec: KernelSpec = registry.select(family.operator, problem, size, arch, wanted, runtime.device_name(device))
            launches[problem] = launch_of(family, name, spec, layout, names, options, device)
            registry.count_plan(spec)
        return launches[problem]

    return resolve


class Caller(NamedTuple):
    """Makes the plans of one public function's calls. `names` are its operands, in the order of the kernels' arguments."""

    family: Family
    name: str
    names: tuple[str, ...]
    required: frozenset[str]
    views_of: Callable[[Views, Any, list[str]], dict[str, Tensor]]  # of operands by name and options; adds to the problems
    reference: Callable[..., None]  # of views, options and, if it is not torch.float32, the dtype for the computation
    dispatch: Callable[[Sequence[Any], Any, bool | None], None]  # calls torch's dispatcher, which returns here with plain tensors
    words: Mapping[str, str] = {}  # operand -> the function's parameter, where they differ
    # `given` are the operands by `names`, and `objections` are errors in arguments that are not tensors.

    def plan(self, given: tuple[Any, ...], options: Any, pdl: bool | None, objections: Sequence[str] = ()) -> Callable[[], None]:
        """A function that runs a call. Raises ArgumentError, and the errors of loading a kernel."""
        if any(isinstance(t, Tensor) and not is_memory(type(t)) for t in given):  # fake or wrapped: the tensor's type handles the call
            return partial(self._hand_over, given, options, pdl, objections)
        named = self.named(given)
        device = next((t.device for t in given if isinstance(t, Tensor)), None)
        if device is not None and device.type == "cuda":
            resolve = resolving(self, named, options, pdl, objections)
            pointers = (*[t.data_ptr() for t in named.values()],)
            launch = resolve(pointers)
            return nothing if launch is None else launch.at(pointers)
        views = self.checked(named, options, pdl, objections)
        if next(iter(views.values())).device.type == "meta":  # without memory there is nothing to write
            return nothing
        check_overlap(self.family, self.name, views, {n: t.data_ptr() for n, t in named.items()}, self.words)
        return partial(self._refer, views, options)

    def _hand_over(self, given: tuple[Any, ...], options: Any, pdl: bool | None, objections: Sequence[str]) -> None:
        """Makes the call through torch's dispatcher. Raises ArgumentError, also for arguments that do not fit the operator's schema."""
        if objections:
            self.foresee(given, options, pdl, objections)
        try:
            self.dispatch(given, options, pdl)
        except SsmgenError:
            raise
        except (LookupError, RuntimeError, TypeError, ValueError):
            self.foresee(given, options, pdl)
            raise

    def foresee(self, given: Sequence[Any], options: Any, pdl: bool | None, objections: Sequence[str] = ()) -> None:
        """Raises the ArgumentError of a call on tensors without memory, for every problem that does not depend on addresses. A call with
        sizes that are not known yet is checked when it runs."""
        try:
            with fakes.of_plain_sizes(given) as known:
                if known is not None:
                    self.checked(self.named(known), options, pdl, objections)
                elif objections:
                    raise ArgumentError(self.name, objections)
        except ArgumentError as e:
            raise fakes.as_tracers_take_it(e) from None

    def _refer(self, views: Views, options: Any) -> None:
        with torch.no_grad():
            self.reference(views, options)

    def named(self, given: tuple[Any, ...]) -> dict[str, Any]:
        """The operands by name, without absent optional ones."""
        return {n: t for n, t in zip(self.names, given, strict=True) if t is not None or n in self.required}

    def checked(self, named: Mapping[str, Any], options: Any, pdl: bool | None, objections: Sequence[str] = ()) -> dict[str, Tensor]:
        """Views of the operands. Raises ArgumentError for every problem that does not depend on addresses."""
        problems = list(objections)
        views = self.views_of(named, options, problems)
        checks.check_pdl(pdl, views, problems)
        if problems:
            raise ArgumentError(self.name, spoken(problems, self.words))
        return views

    def problem_of(
        self, given: tuple[Any, ...], options: Any, pdl: bool | None, objections: Sequence[str] = ()
    ) -> tuple[Any, int, torch.device, bool | None]:
        """(problem, size, device, pdl as asked for) of a call. Raises ArgumentError."""
        named = self.named(given)
        views = self.checked(named, options, pdl, objections)
        device = next(iter(views.values())).device
        placed = device.type != "meta" and all(is_memory(type(t)) for t in named.values())
        where = {n: t.data_ptr() if placed else 0 for n, t in named.items()}
        if placed:
            check_overlap(self.family, self.name, views, where, self.words)
        return self.family.problem_of(views, where, options), self.family.size_of(views), device, pdl
