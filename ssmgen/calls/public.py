"""Public functions and their calls: one like one seen before reaches neither what sorts its arguments nor the checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import runtime
from ..spec import KernelSpec
from . import checks, sharded
from .checks import in_memory
from .memory import Memory
from .naming import spoken
from .planning import Caller, grid_of, launch_of
from .scalars import Scalar, Scalars

P = ParamSpec("P")  # apart from R: type checkers read no assignment of both
R = TypeVar("R")


class Before(NamedTuple):
    """What torch does ahead of every launch of a call: it makes an operand, new in each call, of arguments that are none."""

    function: Callable[..., Any]  # of `given`, with what it writes as `out`
    given: tuple[Tensor, ...]
    out: Tensor

    def __call__(self) -> None:
        self.function(*self.given, out=self.out)


class Call(NamedTuple):
    """What a public function makes of its arguments."""

    caller: Caller
    given: tuple[Any, ...]  # by caller.names; None for what is absent. Each is an argument as it came, or a new tensor
    options: Any
    pdl: bool | None = None
    returns: tuple[str, ...] = ("out",)  # names of the operands that the function returns
    objections: tuple[str, ...] = ()  # to what is no tensor
    before: Before | None = None

    @property
    def result(self) -> Any:
        """What the function returns: one tensor, or several."""
        found = tuple(t for name in self.returns for n, t in zip(self.caller.names, self.given, strict=True) if n == name)
        return found[0] if len(found) == 1 else found

    @property
    def operands(self) -> dict[str, Any]:
        """The tensors by name."""
        return self.caller.named(self.given)

    def dispatch(self) -> None:
        """Runs the call through torch's dispatcher, which comes back to `plan` with plain tensors, or traces it."""
        problems = list(self.objections)
        if not checks.check_tensors(self.operands, problems) or problems:
            torch.ops.ssmgen.refuse(self.caller.name, spoken(problems, self.caller.words))
        if self.before is not None:
            self.before()
        self.caller.dispatch(self.given, self.options, self.pdl)

    def plan(self) -> Callable[[], None]:
        """What runs the call. Raises what the public function does."""
        if self.objections:
            self.caller.checked(self.operands, self.options, self.pdl, self.objections)  # raises, with all else that is wrong
        plan, before = self.caller.plan(self.given, self.options, self.pdl, self.objections), self.before
        if before is None:
            return plan

        def both() -> None:
            before()
            plan()

        return both

    def launch_with(self, spec: KernelSpec) -> runtime.Launch | runtime.Chain:
        """The launch of a variant of the call's problem; `at(pointers)` of it is a plan. Raises ArgumentError; LoadError."""
        operands, caller = self.operands, self.caller
        views = caller.checked(operands, self.options, self.pdl, self.objections)
        device = next(iter(views.values())).device.index
        return launch_of(caller.family, caller.name, spec, views, tuple(operands), self.options, device)

    def check_grid(self, spec: KernelSpec) -> None:
        """Raises ArgumentError where a variant that serves the call would need more blocks than a launch has."""
        views = self.caller.checked(self.operands, self.options, self.pdl, self.objections)
        for part in spec.kernels:
            grid_of(self.caller.family, self.caller.name, part, views)

    @property
    def pointers(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for t in self.operands.values())

    def problem(self) -> tuple[Any, int, torch.device, bool | None]:
        """(problem, size, device, pdl as asked for). Raises ArgumentError."""
        return self.caller.problem_of(self.given, self.options, self.pdl, self.objections)


class Operator(Protocol):
    """A public function as warm(), bind() and explain() know it: what `operator` gives it beside its own parameters and result."""

    __name__: str
    build: Callable[..., Call]  # its call of the same arguments. Raises ArgumentError for what is no tensor
    names: tuple[str, ...]  # its parameters
    scalars: Scalars

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def call_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """What a public function makes of these arguments. Raises ArgumentError for what is no tensor."""
    known: Any = function
    made: Call = known.build(*args, **kwargs)
    return made


def operator(like: str, **own: Scalar) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The public function of a builder: makes the builder's call and returns its result.

    Its signature is the builder's. So a builder declares what the function takes and returns, which editors and `help` show, and returns
    the Call that will give it, cast to that.

    like: a parameter, a tensor (or several) with whose shape all other sizes change; own: see Scalars. `build` of the function is the
    builder, behind the check of what is no tensor.
    """

    def public(builder: Callable[P, R]) -> Callable[P, R]:
        scalars = Scalars(builder, own)
        names = scalars.names
        made = in_memory(builder)
        position = names.index(like)
        recall = Memory()

        @wraps(builder)
        def build(*args: Any, **kwargs: Any) -> Call:
            positional, named, objections = scalars.sound(args, kwargs)
            call: Call = made(*positional, **named)
            return call._replace(objections=(*objections, *call.objections)) if objections else call

        @wraps(builder)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                if sharded.is_sharded((*args, *kwargs.values())):
                    return on_shards(args, kwargs)
                call = build(*args, **kwargs)
                call.dispatch()
                return call.result
            found = recall.latest(args, kwargs)
            if found is not None:
                return found
            size = args[position] if len(args) > position else kwargs.get(like)
            key, found = recall.repeated(size, args, kwargs)
            if found is not None:
                return found
            if sharded.is_sharded((*args, *kwargs.values())):
                return on_shards(args, kwargs)
            call = build(*args, **kwargs)
            (recall.learn(key, call, build, args, kwargs) if on_card(call) else call.plan())()
            return call.result

        def on_shards(args: Any, kwargs: Any) -> Any:
            return sharded.run(run, names, *scalars.checked(args, kwargs))

        vars(run).update(build=build, names=names, scalars=scalars)  # see Operator
        return run

    return public


def on_card(call: Call) -> bool:
    return isinstance(call.given[0], Tensor) and call.given[0].is_cuda
