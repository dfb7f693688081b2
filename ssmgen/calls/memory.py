"""What a public function remembers of its calls: one like one seen before reaches neither what sorts its arguments nor the checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import native, runtime
from .planning import is_memory

if TYPE_CHECKING:
    from .public import Before, Call

Row = Callable[[Sequence[Any], dict[str, Any]], Any]  # of the arguments without names and of those with names
_SCALARS = frozenset((type(None), bool, int, float, str))
_data_ptr = Tensor.data_ptr


def _no_row(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A row of no call."""


class Memory(runtime.Table):
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

    def learn(self, key: Any, call: Call, build: Callable[..., Call], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        """The plan of a call that is not known yet. The next one like it is found, if the arguments say all there is to say of it."""
        values = (*args, *kwargs.values())
        flat_of = _flattening(values)
        flat: Sequence[Any] = values if flat_of is None else flat_of(values) or ()
        tensors = [i for i, v in enumerate(flat) if is_memory(type(v))]
        plain = [i for i, v in enumerate(flat) if type(v) in _SCALARS]
        given = {id(flat[i]): i for i in tensors}
        operands, seen = call.operands, call
        if len(given) < len(tensors):  # one comes twice: which is which can be seen of a call with aliases
            alias = [v.detach() if i in tensors else v for i, v in enumerate(flat)]
            given = {id(alias[i]): i for i in tensors}
            seen = build(*_like(args, it := iter(alias)), **dict(zip(kwargs, _like(kwargs.values(), it), strict=True)))
        positions = {name: given[id(t)] for name, t in seen.operands.items() if id(t) in given}
        aside = [given[id(t)] for t in seen.before.given if id(t) in given] if seen.before else []
        if len(tensors) + len(plain) < len(flat) or {*positions.values(), *aside} != {*tensors}:  # what is compared nowhere may matter
            return call.plan()
        before = call.before
        if before is not None:  # what it makes comes behind the arguments, as if it were one
            positions |= {name: len(flat) for name, t in operands.items() if t is before.out}
        taken = flat if before is None else [*flat, before.out]
        new = {name: t for name, t in operands.items() if name not in positions}
        named = {name: operands[name] for name in (*positions, *new)}
        made = call.caller.pattern(named, call.options, call.pdl, call.objections, taken, list(positions.values()))
        plan = made.plan((*made.pick(taken), *new.values()))
        places = {name: made.positions.index(i) for name, i in positions.items()} | {n: len(made.positions) + i for i, n in enumerate(new)}
        rest = made, [*map(runtime.maker, new.values())], [places[name] for name in call.returns]
        if before is None:
            self.add(key, row_of(len(args), [*kwargs], values, plain, *rest))
            return plan
        values_of = _all_of(len(args), [*kwargs], flat_of)
        self.add(key, _behind(before, values_of, aside, flat, row_of(len(taken), [], (*taken,), plain, *rest)))

        def both() -> None:
            before()
            plan()

        return both


def row_of(
    count: int,
    names: Sequence[str],
    values: tuple[Any, ...],
    plain: Sequence[int],
    pattern: runtime.Pattern,
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
    pattern: runtime.Pattern,
    new: Sequence[Callable[[], Tensor]],
    returned: Sequence[int],
) -> Row:
    """A row as row_of makes it in Python, of values that are in no tuples or lists."""
    matches, plans, add, more, result = pattern.matches, pattern.plans, pattern.add, len(names), itemgetter(*returned)
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
        (plans.get(pointers) or add(pointers))()
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

    def again(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        flat = values_of(args, kwargs)
        return None if flat is None else row(flat, {})

    return again


def _behind(
    before: Before, values_of: Callable[[Sequence[Any], dict[str, Any]], Any], aside: Sequence[int], seen: Sequence[Any], row: Row
) -> Row:
    """A row of a call with a `before`, whose arguments lie aside. row: of the arguments in a row and what it makes, behind them; where that
    knows no such call, it is made in vain."""
    function, make, pick = before.function, runtime.maker(before.out), runtime.picking(aside)
    matches = runtime.matching(pick(seen))

    def again(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        flat = values_of(args, kwargs)
        if flat is None or not matches(*(given := pick(flat))):
            return None
        function(*given, out=(made := make()))
        return row((*flat, made), {})

    return again


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
