"""Public functions, and `run`, which makes their calls.

A public function ends in `return run(…)`. Before its body, `operator` asks the fast path (`fast_path.py`) for a call like this one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..launch import runtime
from ..spec.kernel import KernelSpec
from . import checks, sharded
from .checks import in_memory
from .fast_path import FastPath
from .naming import spoken
from .planning import Caller, grid_of, launch_of
from .scalars import Scalar, Scalars

P = ParamSpec("P")  # separate from R: type checkers cannot read a joint assignment of both
R = TypeVar("R")


class Before(NamedTuple):
    """A function of torch that runs before every launch of a call. It makes an operand, new in each call, from arguments that are not
    operands."""

    function: Callable[..., Any]  # called with `given`, and `out` as the tensor to write
    given: tuple[Tensor, ...]
    out: Tensor

    def __call__(self) -> None:
        self.function(*self.given, out=self.out)


class Call(NamedTuple):
    """The call that a public function makes from its arguments."""

    caller: Caller
    # In the order of caller.names; None for absent operands. Each is an argument unchanged, a new tensor, or named in `within`.
    given: tuple[Any, ...]
    options: Any
    pdl: bool | None = None
    returns: tuple[str, ...] = ("out",)  # names of the operands that the function returns
    objections: tuple[str, ...] = ()  # to arguments that are not tensors
    before: Before | None = None
    within: Mapping[str, Tensor] = {}  # operands that are views of an argument, and that argument; its layout determines the view's

    @property
    def result(self) -> Any:
        """The function's result: one tensor, or several."""
        return _result(self)

    @property
    def operands(self) -> dict[str, Any]:
        """The tensors by name."""
        return self.caller.named(self.given)

    def dispatch(self) -> None:
        """Runs the call through torch's dispatcher, which calls `plan` with plain tensors, or traces the call."""
        problems = list(self.objections)
        if not checks.check_tensors(self.caller.named(self.given), problems) or problems:
            torch.ops.ssmgen.refuse(self.caller.name, spoken(problems, self.caller.words))
        if self.before is not None:
            self.before()
        self.caller.dispatch(self.given, self.options, self.pdl)

    def plan(self) -> Callable[[], None]:
        """A function that runs the call. Raises the errors of the public function."""
        if self.objections:
            self.caller.checked(self.operands, self.options, self.pdl, self.objections)  # raises, and lists all other problems too
        plan, before = self.caller.plan(self.given, self.options, self.pdl, self.objections), self.before
        if before is None:
            return plan

        def both() -> None:
            before()
            plan()

        return both

    def launch_with(self, spec: KernelSpec) -> runtime.Launch | runtime.Chain:
        """The launch of a variant for the call's problem; its `at(pointers)` is a plan. Raises ArgumentError; LoadError."""
        operands, caller = self.operands, self.caller
        views = caller.checked(operands, self.options, self.pdl, self.objections)
        device = next(iter(views.values())).device.index
        return launch_of(caller.family, caller.name, spec, views, tuple(operands), self.options, device)

    def check_grid(self, spec: KernelSpec) -> None:
        """Raises ArgumentError if a variant that serves the call needs more blocks than a launch can have."""
        views = self.caller.checked(self.operands, self.options, self.pdl, self.objections)
        for part in spec.kernels:
            grid_of(self.caller.family, self.caller.name, part, views)

    @property
    def pointers(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for t in self.operands.values())

    def problem(self) -> tuple[Any, int, torch.device, bool | None]:
        """(problem, size, device, pdl as asked for). Raises ArgumentError."""
        return self.caller.problem_of(self.given, self.options, self.pdl, self.objections)


def _result(call: Call) -> Any:
    """A function, and not a property: Dynamo of torch 2.10 does not evaluate the properties of a named tuple."""
    found = tuple(t for name in call.returns for n, t in zip(call.caller.names, call.given, strict=True) if n == name)
    return found[0] if len(found) == 1 else found


class Operator(Protocol):
    """A public function as warm(), bind() and explain() see it: the attributes that `operator` adds to it."""

    __name__: str
    build: Callable[..., Call]  # makes the call for the same arguments. Raises ArgumentError for arguments that are not tensors
    names: tuple[str, ...]  # its parameters
    scalars: Scalars

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class _Asked(threading.local):
    """The request of a thread to the next `run`."""

    learn: Callable[[Call], Callable[[], None]] | None = None  # lets the fast path learn the call, and gives its plan
    calls: list[Call] | None = None  # takes the call, which is then not launched


_asked = _Asked()


@contextmanager
def _learning(learn: Callable[[Call], Callable[[], None]]) -> Iterator[None]:
    before = _asked.learn, _asked.calls
    _asked.learn, _asked.calls = learn, None
    try:
        yield
    finally:
        _asked.learn, _asked.calls = before


def run(
    caller: Caller, tensors: Sequence[Any], options: Any, pdl: bool | None = None, *, returns: tuple[str, ...] = ("out",),
    objections: tuple[str, ...] = (), before: Before | None = None, within: Mapping[str, Tensor] = {},
) -> R:  # type: ignore[type-var]  # what the public function returns  # fmt: skip
    """Makes a call and returns its result: the tensors that `returns` names. Every public function ends here.

    tensors: by `caller.names`; objections: errors in arguments that are not tensors; within: as in Call.
    `build` takes the call before it is launched. Tracers see torch's operator instead of the launch.
    """
    call = Call(caller, (*tensors,), options, pdl, returns, objections, before, within)
    if is_compiling():
        call.dispatch()
    elif _asked.calls is not None:
        _asked.calls.append(call)
    else:
        launch(call, _asked.learn)
    result: R = _result(call)
    return result


def launch(call: Call, learn: Callable[[Call], Callable[[], None]] | None) -> None:
    """Runs a call that the fast path does not know. learn: `FastPath.learn`, which remembers it."""
    plan = learn(call) if learn is not None and on_card(call) else call.plan()
    plan()


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, hidden from Dynamo. After a graph break Dynamo would trace the function on its own, and launch the call."""
    return _hidden(function) if "torch._dynamo" in sys.modules else function


@cache
def _hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def call_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """The call that a public function makes from these arguments. Raises ArgumentError for arguments that are not tensors."""
    known: Any = function
    made: Call = known.build(*args, **kwargs)
    return made


def operator(like: str, **own: Scalar) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a public function from a body that ends in `run`: a call like an earlier one skips the body.

    like: a parameter for a tensor (or several); all other sizes change with its shape. own: see Scalars. The function's `build` returns the
    call for its arguments, and launches nothing.
    """

    def public(body: Callable[P, R]) -> Callable[P, R]:
        scalars = Scalars(body, own)
        names = scalars.names
        made: Callable[..., Any] = in_memory(body)
        position = names.index(like)
        known = FastPath()

        @wraps(body)
        def build(*args: Any, **kwargs: Any) -> Call:
            positional, named, objections = scalars.sound(args, kwargs)
            calls: list[Call] = []
            before = _asked.calls
            _asked.calls = calls
            try:
                _untraced(made)(*positional, **named)
            finally:
                _asked.calls = before
            (call,) = calls
            return call._replace(objections=(*objections, *call.objections)) if objections else call

        @wraps(body)
        def function(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                if sharded.is_sharded((*args, *kwargs.values())):
                    return on_shards(args, kwargs)
                positional, named, objections = scalars.sound(args, kwargs)
                if objections:
                    torch.ops.ssmgen.refuse(body.__name__, list(objections))
                return made(*positional, **named)
            found = known.latest(args, kwargs)
            if found is not None:
                return found
            size = args[position] if len(args) > position else kwargs.get(like)
            key, found = known.repeated(size, args, kwargs)
            if found is not None:
                return found
            if sharded.is_sharded((*args, *kwargs.values())):
                return on_shards(args, kwargs)
            positional, named, objections = scalars.sound(args, kwargs)
            if objections:
                build(*args, **kwargs).plan()  # raises, and lists all other problems too
            learn = partial(known.learn, key, build, args, kwargs)
            with _learning(learn):
                return made(*positional, **named)

        def on_shards(args: Any, kwargs: Any) -> Any:
            return sharded.run(function, names, *scalars.checked(args, kwargs))

        vars(function).update(build=build, names=names, scalars=scalars)  # see Operator
        return function

    return public


def on_card(call: Call) -> bool:
    return isinstance(call.given[0], Tensor) and call.given[0].is_cuda
