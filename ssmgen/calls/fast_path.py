"""The fast path: have we launched this form of a call before? Then neither its arguments are sorted nor its operands checked.

`operator.run` and the operators of torch (`dispatch.py`) ask it first, and let it learn what it does not know.
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

Row = Callable[[Sequence[Any], dict[str, Any]], Any]  # of the arguments without names and of those with names
_PLAIN = (type(None), str, Number)  # compared by type and value
Resolve = Callable[[tuple[int, ...]], "runtime.Launch | runtime.Chain | None"]  # of pointers; None: there is nothing to launch
_data_ptr = Tensor.data_ptr


def _no_row(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A row of no call."""


class Table:
    """Rows of what is alike in what is cheap to hash. Cleared when a caller with ever new shapes has filled it, and in a child process."""

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
    """The calls of one public function. A row makes a call that differs in nothing but where its tensors lie, and returns its result; None
    where the arguments are others. Its key is the form of the arguments, their number and names, and how many elements one has."""

    latest: Row  # of calls that come again and again, as those of layers do, and not in turn with others
    _last: Row  # that the table had

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        super().clear()
        self.latest = self._last = _no_row

    def repeated(self, size: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """(key, result) of a call that is not like the latest one; no result where it is not known, and no key for sizes that are symbols,
        as fake tensors may have them."""
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
        """The plan of a call that is not known yet. The next one like it is found, if the arguments say all there is to say of it."""
        values = (*args, *kwargs.values())
        flat_of = _flattening(values)
        flat: Sequence[Any] = values if flat_of is None else flat_of(values) or ()
        tensors = [i for i, v in enumerate(flat) if is_memory(type(v))]
        plain = [i for i, v in enumerate(flat) if isinstance(v, _PLAIN)]
        given = {id(flat[i]): i for i in tensors}
        operands, seen = call.operands, call
        if len(given) < len(tensors):  # one comes twice: which is which can be seen of a call with aliases
            alias = [v.detach() if i in tensors else v for i, v in enumerate(flat)]
            given = {id(alias[i]): i for i in tensors}
            seen = build(*_like(args, it := iter(alias)), **dict(zip(kwargs, _like(kwargs.values(), it), strict=True)))
        if len(tensors) + len(plain) < len(flat):  # what is compared nowhere may matter
            return call.plan()
        positions = {name: given[id(t)] for name, t in seen.operands.items() if id(t) in given}
        aside = [given[id(t)] for t in seen.before.given if id(t) in given] if seen.before else []
        unused = [i for i in tensors if i not in positions.values() and i not in aside]
        before = call.before
        if before is not None:  # what it makes comes behind the arguments, as if it were one
            positions |= {name: len(flat) for name, t in operands.items() if t is before.out}
        taken = flat if before is None else [*flat, before.out]
        new = {name: t for name, t in operands.items() if name not in positions}
        named = {name: operands[name] for name in (*positions, *new)}
        resolve = resolving(call.caller, named, call.options, call.pdl, call.objections)
        made = Pattern(taken, resolve, list(positions.values()), unused)
        plan = made.plan((*made.pick(taken), *new.values()))
        places = {name: made.positions.index(i) for name, i in positions.items()} | {n: len(made.positions) + i for i, n in enumerate(new)}
        rest = made, [*map(maker, new.values())], [places[name] for name in call.returns]
        if before is None:
            self.add(key, row_of(len(args), [*kwargs], values, plain, *rest))
            return plan
        values_of = _all_of(len(args), [*kwargs], flat_of)
        self.add(key, _behind(before, values_of, aside, flat, row_of(len(taken), [], (*taken,), plain, *rest)))

        def both() -> None:
            before()
            plan()

        return both


class Pattern:
    """The calls that differ in nothing but where their tensors lie.

    `given` is all that a call was given. Its operands lie at `positions`; their pointers go to `resolve` in that order, and after them
    the pointers of tensors that were not given. Tensors at `unused` are compared and are no operands. Alignment and overlap are functions
    of the pointers: `resolve` checks them and makes the plan, once per set of pointers. All else takes tensors and their pointers as they
    were given, `positions` of the pattern.
    """

    __slots__ = ("_order", "_resolve", "matches", "pick", "plans", "positions")

    limit = 1024  # pointer sets remembered; caching allocators hand out the same few again and again

    def __init__(self, given: Sequence[Any], resolve: Resolve, positions: Sequence[int], unused: Sequence[int] = ()):
        self.positions = sorted({*positions, *unused})
        self._order = [self.positions.index(i) for i in positions]
        self.pick = picking(self.positions)
        self.matches = matching([given[i] for i in self.positions])
        self._resolve = resolve
        self.plans: dict[tuple[int, ...], Callable[[], None]] = {}

    def new_plan(self, pointers: tuple[int, ...]) -> runtime.Plan:
        """The plan for pointers not seen before. Raises what `resolve` raises."""
        ordered = *(pointers[i] for i in self._order), *pointers[len(self.positions) :]
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
    """A predicate: are these tensors, with the types, shapes, strides, dtypes, devices and grad flags of the given ones?

    torch's own guard object compares 11 tensors in 1.3 us; the same in Python takes 3. It answers no when one object comes twice,
    so such patterns, and releases of torch without it, use the Python form.
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
    """A predicate: may these tensors stand for the given ones in a call like theirs?"""
    guard = tensor_guard(tensors)
    # Weights may require grad where no graph is recorded. Elsewhere such a call is not one like this, and the checks refuse it.
    needs_grad = any(t.requires_grad for t in tensors)
    return (lambda *ts: not torch.is_grad_enabled() and guard(*ts)) if needs_grad else guard


# What inductor's kernels allocate with: on the current device, past the dispatcher, in half of the time.
_empty: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def maker(like: Tensor) -> Callable[[], Tensor]:
    """What makes tensors of the layout and dtype of one, on its device. Their elements may be anything."""
    anywhere = partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device)
    if _empty is None or not like.is_cuda:
        return anywhere
    index, here = like.device.index, partial(_empty, tuple(like.shape), like.stride(), like.dtype)
    return here if torch.cuda.device_count() == 1 else lambda: here() if runtime.current_device() == index else anywhere()


def picking(positions: Sequence[int]) -> Callable[[Any], Any]:
    """An itemgetter that returns several values also where they are one or none."""
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
    """A row of Memory, of a call that was seen with these arguments: so many without names, and then those with names.

    plain: positions of those that are no tensors, where the items of tuples and lists have places of their own, as they have for
    the pattern. new: makes each tensor that the function makes. returned: positions of tensors, those given and then the new ones
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
    """A row as row_of makes it in Python, of values that are in no tuples or lists."""
    matches, plans, new_plan, more, result = pattern.matches, pattern.plans, pattern.new_plan, len(names), itemgetter(*returned)
    at, by = _taking(pattern.positions, count, names)
    plain_at, plain_by = _taking(plain, count, names)
    kept = (*(seen[i] for i in plain),)
    kinds = [*map(type, kept)]

    def again(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Nothing is put in a row but what is compared: values and names of a dozen keywords, in tuples, take 0.4 us.
        if len(args) != count or len(kwargs) != more:
            return None
        try:
            if kept:
                rest = plain_at(args) if plain_at else ()
                if plain_by:
                    rest += plain_by(kwargs)
                if [*map(type, rest)] != kinds or rest != kept:  # types first: nothing is compared with what is of another type
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
    """(what takes, of arguments without names, those at these positions; what takes the others, of those with names, which come behind
    them); None where there are none such."""
    at, by = [i for i in positions if i < count], [names[i - count] for i in positions if i >= count]
    return _items(at), _items(by)


def _items(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]] | None:
    """What takes items in a tuple, also a single one; None if there are none."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return (lambda items: (items[keys[0]],)) if keys else None


def _all_of(
    count: int, names: Sequence[str], flat_of: Callable[[tuple[Any, ...]], Any] | None
) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    """What puts arguments in a row, those in tuples and lists in their places; None where there are others, or other names."""
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
    """A row of a call with tuples or lists among its arguments. row: of these in a row"""

    def flattened(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        flat = values_of(args, kwargs)
        return None if flat is None else row(flat, {})

    return flattened


def _behind(
    before: Before, values_of: Callable[[Sequence[Any], dict[str, Any]], Any], aside: Sequence[int], seen: Sequence[Any], row: Row
) -> Row:
    """A row of a call with a `before`, whose arguments lie aside. row: of the arguments in a row and what it makes, behind them; where that
    knows no such call, it is made in vain."""
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
    """What puts those in tuples and lists in their places, in values of the same types and lengths, and returns None for others. None
    where there are neither tuples nor lists."""
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
    """The next of the flat values, in tuples and lists as `values` are."""
    return [_again(v, [next(flat) for _ in v]) if isinstance(v, (tuple, list)) else next(flat) for v in values]


def _again(v: Any, items: list[Any]) -> Any:
    return type(v)(*items) if hasattr(v, "_fields") else type(v)(items)
