"""The fast path: a call of a form that has run before is launched again, without sorting its arguments or checking its operands.

`operator.run` and the operators of torch (`dispatch.py`) ask it first, and have it learn calls that it does not know.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Number
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..launch import native, runtime
from .planning import is_memory, nothing, resolving

if TYPE_CHECKING:
    from .operator import Before, Call

Row = Callable[[Sequence[Any], dict[str, Any]], Any]  # of positional arguments and keyword arguments
_PLAIN = (type(None), str, Number)  # compared by type and value
Resolve = Callable[[tuple[int, ...]], "runtime.Launch | runtime.Chain | None"]  # of pointers; None: there is nothing to launch
_data_ptr = Tensor.data_ptr


def _no_row(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """The row of no call: it serves nothing."""


class Table:
    """Rows by a key that is cheap to hash; rows with one key are tried in turn. Cleared in a child process, and when a caller with ever new
    shapes has filled it."""

    limit = 4096

    def __init__(self) -> None:
        self.rows: dict[Any, tuple[Any, ...]] = {}
        _tables.add(self)

    def add(self, key: Any, entry: Any) -> None:
        if len(self.rows) >= self.limit:
            self.rows.clear()
        self.rows[key] = (entry, *self.rows.get(key, ()))[:64]

    def clear(self) -> None:
        self.rows.clear()


_tables: weakref.WeakSet[Table] = weakref.WeakSet()


def forget() -> None:
    """Empties all tables: a child process has no kernels."""
    for table in _tables:
        table.clear()


os.register_at_fork(after_in_child=forget)


class FastPath(Table):
    """The calls of one public function. A row makes a call that differs only in tensor addresses and returns its result, or returns None if
    other arguments differ. Its key: the number and names of the arguments, and the number of elements of one of them."""

    latest: Row  # of calls that repeat without others in between, such as the calls of one layer after another
    _last: Row  # the last row that the table found

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        super().clear()
        self.latest = self._last = _no_row

    def repeated(self, size: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """(key, result) of a call that `latest` does not serve. The result is None if no row serves it, and the key is None if sizes are
        symbols, as they may be in fake tensors."""
        first = size[0] if isinstance(size, (tuple, list)) and size else size
        try:
            key = (len(args), *kwargs, first.numel() if isinstance(first, Tensor) else 0)
            rows = self.rows.get(key, ())
        except (RuntimeError, TypeError):
            return None, None
        for again in rows:
            found = again(args, kwargs)
            if found is not None:
                self.latest, self._last = again if again is self._last else _no_row, again
                return key, found
        return key, None

    def learn(self, key: Any, build: Callable[..., Call], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Callable[[], None]:
        """The plan of a new call. Later calls like it are found, if the arguments alone determine the call."""
        values = (*args, *kwargs.values())
        flat_of = _flattening(values)
        flat: Sequence[Any] = values if flat_of is None else flat_of(values) or ()
        tensors = [i for i, v in enumerate(flat) if is_memory(type(v))]
        plain = [i for i, v in enumerate(flat) if isinstance(v, _PLAIN)]
        given = {id(flat[i]): i for i in tensors}
        operands, seen = call.operands, call
        if len(given) < len(tensors):  # a tensor is given twice: a call with aliases shows which argument becomes which operand
            alias = [v.detach() if i in tensors else v for i, v in enumerate(flat)]
            given = {id(alias[i]): i for i in tensors}
            seen = build(*_like(args, it := iter(alias)), **dict(zip(kwargs, _like(kwargs.values(), it), strict=True)))
        if len(tensors) + len(plain) < len(flat):  # an argument that is not compared may change the call
            return call.plan()
        positions = {name: given[id(t)] for name, t in seen.operands.items() if id(t) in given}
        positions |= {name: given[id(whole)] for name, whole in seen.within.items()}
        starts = {name: operands[name].data_ptr() - whole.data_ptr() for name, whole in call.within.items()}
        aside = [given[id(t)] for t in seen.before.given if id(t) in given] if seen.before else []
        unused = [i for i in tensors if i not in positions.values() and i not in aside]
        before = call.before
        if before is not None:  # its output follows the arguments, as if it were one of them
            positions |= {name: len(flat) for name, t in operands.items() if t is before.out}
        taken = flat if before is None else [*flat, before.out]
        new = {name: t for name, t in operands.items() if name not in positions}
        named = {name: operands[name] for name in (*positions, *new)}
        resolve = resolving(call.caller, named, call.options, call.pdl, call.objections)
        made = Pattern(taken, resolve, list(positions.values()), unused, [starts.get(name, 0) for name in positions])
        plan = made.plan((*made.pick(taken), *new.values()))
        places = {name: made.positions.index(i) for name, i in positions.items()} | {n: len(made.positions) + i for i, n in enumerate(new)}
        rest = made, [*map(maker, new.values())], [places[name] for name in call.returns]
        if before is None:
            self.add(key, row_of(len(args), [*kwargs], values, plain, *rest))
            return plan
        values_of = _all_of(len(args), [*kwargs], flat_of)
        self.add(key, _with_before(before, values_of, aside, flat, row_of(len(taken), [], (*taken,), plain, *rest)))

        def both() -> None:
            before()
            plan()

        return both


class Pattern:
    """Calls that differ only in tensor addresses.

    `given` is all arguments of a call. Its operands lie at `positions`; their pointers go to `resolve` in that order, followed by the
    pointers of new tensors. An operand begins `starts` bytes after its tensor, if it is a view. Tensors at `unused` are compared but are
    not operands. Alignment and overlap depend on the pointers: `resolve` checks them and makes the plan, once per set of pointers. The
    other methods take the given tensors and their pointers in the order of the pattern's `positions`.
    """

    __slots__ = ("_order", "_resolve", "matches", "pick", "plans", "positions")

    limit = 1024  # pointer sets remembered; caching allocators hand out the same few again and again

    def __init__(
        self, given: Sequence[Any], resolve: Resolve, positions: Sequence[int], unused: Sequence[int] = (), starts: Sequence[int] = ()
    ):
        self.positions = sorted({*positions, *unused})
        self._order = [(self.positions.index(i), start) for i, start in zip(positions, starts or [0] * len(positions), strict=True)]
        self.pick = picking(self.positions)
        self.matches = matching([given[i] for i in self.positions])
        self._resolve = resolve
        self.plans: dict[tuple[int, ...], Callable[[], None]] = {}

    def new_plan(self, pointers: tuple[int, ...]) -> runtime.Plan:
        """The plan for pointers not seen before. Raises what `resolve` raises."""
        ordered = *(pointers[i] + start for i, start in self._order), *pointers[len(self.positions) :]
        launch = self._resolve(ordered)
        if len(self.plans) >= self.limit:
            self.plans.clear()
        plan = self.plans[pointers] = nothing if launch is None else launch.at(ordered)
        return plan

    def at(self, pointers: tuple[int, ...]) -> runtime.Plan:
        """The plan for pointers. Raises what `resolve` raises."""
        return self.plans.get(pointers) or self.new_plan(pointers)

    def plan(self, tensors: Sequence[Tensor]) -> runtime.Plan:
        """The plan for operands that match. Raises what `resolve` raises."""
        return self.at((*map(_data_ptr, tensors),))


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A predicate: do these tensors have the types, shapes, strides, dtypes, devices and grad flags of the given ones?

    torch's own guard object compares 11 tensors in 1.3 us; Python takes 3 us. The guard fails if one object is given twice, so such
    patterns use the Python form. Releases of torch without the guard use it too.
    """
    if len({id(t) for t in tensors}) == len(tensors):
        try:
            from torch._C._dynamo.guards import TensorGuards

            guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            if guard.check(*tensors):
                return guard.check
        except (ImportError, TypeError):
            pass

    def describe(ts: Sequence[Tensor]) -> list[tuple]:
        return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in ts]

    types, expected = [*map(type, tensors)], describe(tensors)
    return lambda *ts: [*map(type, ts)] == types and describe(ts) == expected


def matching(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A predicate: may these tensors replace the given ones in the same call?"""
    guard = tensor_guard(tensors)
    # Weights may require grad while no graph is recorded. While one is recorded, the row does not match, and the checks refuse the call.
    needs_grad = any(t.requires_grad for t in tensors)
    return (lambda *ts: not torch.is_grad_enabled() and guard(*ts)) if needs_grad else guard


# Inductor's allocator: on the current device, without the dispatcher, in half the time.
_empty: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def maker(like: Tensor) -> Callable[[], Tensor]:
    """A function that makes tensors with the layout, dtype and device of one. Their elements are not initialised."""
    anywhere = partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device)
    if _empty is None or not like.is_cuda:
        return anywhere
    index, here = like.device.index, partial(_empty, tuple(like.shape), like.stride(), like.dtype)
    return here if torch.cuda.device_count() == 1 else lambda: here() if runtime.current_device() == index else anywhere()


def picking(positions: Sequence[int]) -> Callable[[Any], Any]:
    """An itemgetter that always returns a sequence, also for one position or none."""
    return itemgetter(*positions) if len(positions) > 1 else itemgetter(slice(*(positions[0], positions[0] + 1) if positions else (0,)))


def row_of(
    count: int,
    names: Sequence[str],
    values: tuple[Any, ...],
    plain: Sequence[int],
    pattern: Pattern,
    new: Sequence[Callable[[], Tensor]],
    returned: Sequence[int],
) -> Row:
    """A row of FastPath for a call that was seen with these arguments: `count` positional ones, then those with `names`.

    plain: positions of arguments that are not tensors. Items of tuples and lists have positions too, as in the pattern.
    new: makes each tensor that the function makes. returned: positions of the returned tensors, in the given tensors followed by the new
    ones
    """
    if made := native.found():
        return made.Row(count, names, values, plain, pattern.positions, pattern.at, pattern.limit, new, returned)
    flat_of = _flattening(values)
    flat = flat_of and flat_of(values)
    if flat is None:
        return _row(count, names, values, plain, pattern, new, returned)
    return _flat(_all_of(count, names, flat_of), _row(len(flat), [], flat, plain, pattern, new, returned))


def _row(
    count: int,
    names: Sequence[str],
    seen: Sequence[Any],
    plain: Sequence[int],
    pattern: Pattern,
    new: Sequence[Callable[[], Tensor]],
    returned: Sequence[int],
) -> Row:
    """A row as in row_of, in Python, for arguments without tuples or lists."""
    matches, plans, new_plan, more, result = pattern.matches, pattern.plans, pattern.new_plan, len(names), itemgetter(*returned)
    at, by = _taking(pattern.positions, count, names)
    plain_at, plain_by = _taking(plain, count, names)
    kept = (*(seen[i] for i in plain),)
    kinds = [*map(type, kept)]

    def again(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Only the compared arguments are collected: collecting values and names of a dozen keywords in tuples takes 0.4 us.
        if len(args) != count or len(kwargs) != more:
            return None
        try:
            if kept:
                rest = plain_at(args) if plain_at else ()
                if plain_by:
                    rest += plain_by(kwargs)
                if [*map(type, rest)] != kinds or rest != kept:  # types first: values of different types are never compared
                    return None
            tensors = at(args) if at else ()
            if by:
                tensors += by(kwargs)
        except KeyError:  # another name
            return None
        if not matches(*tensors):
            return None
        for make in new:
            tensors += (make(),)
        pointers = (*map(_data_ptr, tensors),)
        (plans.get(pointers) or new_plan(pointers))()
        return result(tensors)

    return again


def _taking(positions: Sequence[int], count: int, names: Sequence[str]) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """(getter of the positional arguments at these positions, getter of the keyword arguments at the other positions). Keyword arguments
    are counted after the positional ones. A getter is None if it would take nothing."""
    at, by = [i for i in positions if i < count], [names[i - count] for i in positions if i >= count]
    return _items(at), _items(by)


def _items(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]] | None:
    """A getter that returns items as a tuple, even a single one; None if there are no keys."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return (lambda items: (items[keys[0]],)) if keys else None


def _all_of(
    count: int, names: Sequence[str], flat_of: Callable[[tuple[Any, ...]], Any] | None
) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    """A function that lists a call's arguments, with tuples and lists expanded; it returns None if their number, names or forms differ."""
    more = len(names)
    _, by = _taking([*range(count, count + more)], count, names)

    def values_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) != count or len(kwargs) != more:
            return None
        try:
            values = (*args, *by(kwargs)) if by else (*args,)
        except KeyError:
            return None
        return values if flat_of is None else flat_of(values)

    return values_of


def _flat(values_of: Callable[[Sequence[Any], dict[str, Any]], Any], row: Row) -> Row:
    """A row for a call with tuples or lists among its arguments. row: takes the expanded arguments"""

    def flattened(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        flat = values_of(args, kwargs)
        return None if flat is None else row(flat, {})

    return flattened


def _with_before(
    before: Before, values_of: Callable[[Sequence[Any], dict[str, Any]], Any], aside: Sequence[int], seen: Sequence[Any], row: Row
) -> Row:
    """A row of a call with a `before`, whose arguments are at the positions `aside`. row: takes the arguments, followed by the output of
    `before`. If `row` does not serve the call, `before` has run in vain."""
    function, make, pick = before.function, maker(before.out), picking(aside)
    matches = matching(pick(seen))

    def preceded(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        flat = values_of(args, kwargs)
        if flat is None or not matches(*(given := pick(flat))):
            return None
        function(*given, out=(made := make()))
        return row((*flat, made), {})

    return preceded


def _flattening(values: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], list[Any] | None] | None:
    """A function that expands tuples and lists among values of these types and lengths, and returns None for other values. None if there
    are neither tuples nor lists."""
    several = [(i, type(v), len(v)) for i, v in enumerate(values) if isinstance(v, (tuple, list))]

    def flat_of(values: tuple[Any, ...]) -> list[Any] | None:
        flat: list[Any] = []
        start = 0
        for i, kind, length in several:
            v = values[i]
            if type(v) is not kind or len(v) != length:
                return None
            flat += values[start:i]
            flat += v
            start = i + 1
        flat += values[start:]
        return flat

    return flat_of if several else None


def _like(values: Any, flat: Any) -> list[Any]:
    """Takes the next flat values, and groups them in tuples and lists as in `values`."""
    return [_again(v, [next(flat) for _ in v]) if isinstance(v, (tuple, list)) else next(flat) for v in values]


def _again(v: Any, items: list[Any]) -> Any:
    return type(v)(*items) if hasattr(v, "_fields") else type(v)(items)
