"""torch's operators, `torch.ops.ssmgen.…`: the form of a call for torch.compile, torch.export and opcheck.

An operator's schema is its table of operands, then its options, then pdl. Library.define and impl cost 2.5 us a call, custom_op 33 us.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import torch

from ..spec.operands import Table
from .fast_path import FastPath
from .operator import Call, on_card
from .planning import Caller, Family

_library = torch.library.Library("ssmgen", "FRAGMENT")
_KINDS: dict[Any, str] = {bool: "bool", int: "int", float: "float", str: "str", tuple[float, float]: "float[]"}


_hints = functools.cache(get_type_hints)


def _said(options: Any, names: Sequence[str], taken: Sequence[str]) -> list[str]:
    """These options in the operator's schema; the fields of a NamedTuple become separate arguments. taken: names of operands."""
    found: list[str] = []
    for name in names:
        kind = _hints(options)[name]
        if hasattr(kind, "_fields"):
            found += _said(kind, kind._fields, taken)
        else:
            found.append(f"{_kind(kind)} {name}{'_form' if name in taken else ''}")
    return found


def _kind(kind: Any) -> str:
    """An option's type in the schema. An optional integer is a size, which tracers may represent as a symbol."""
    if isinstance(kind, UnionType):
        (one,) = [part for part in get_args(kind) if part is not NoneType]
        return "SymInt?" if one is int else f"{_KINDS[one]}?"
    return _KINDS[kind]


def _flat(options: Any, names: Sequence[str]) -> list[Any]:
    """These options as arguments of the operator."""
    found: list[Any] = []
    for name in names:
        value = getattr(options, name)
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # Dynamo fails on attribute lookups of symbolic numbers
            found += _flat(value, value._fields)
        else:
            found.append(list(value) if isinstance(value, tuple) else value)
    return found


def _options(kind: Any, names: Sequence[str], values: Iterator[Any]) -> Any:
    """The inverse of `_flat`: the options with these values."""
    given: dict[str, Any] = {}
    for name in names:
        hint = _hints(kind)[name]
        if hasattr(hint, "_fields"):
            given[name] = _options(hint, hint._fields, values)
        else:
            value = next(values)
            given[name] = tuple(value) if isinstance(value, list) else value
    return kind(**given)


def by_name(reference: Callable[..., None]) -> Callable[..., None]:
    """The reference of a family whose options are named like the arguments of `reference`."""

    def run(views: Mapping[str, Any], options: Any, dtype: torch.dtype = torch.float32) -> None:
        reference(**views, **options._asdict(), dtype=dtype)

    return run


def callers(
    family: Family, tables: Mapping[str, Table], options: Any, views_of: Callable[..., Any] | Mapping[str, Callable[..., Any]],
    reference: Callable[..., None], operator: str = "", of_options: Sequence[str] = (), words: Mapping[str, Mapping[str, str]] = {},
) -> dict[str, Caller]:  # fmt: skip
    """Defines the operator of public functions, and returns how each of them makes its calls.

    tables: by public function; all have the same operands, but names and the set of required operands may differ. If several functions
    share the operator, its first argument is the function's name. options: a NamedTuple of numbers, switches, words and limits. views_of:
    for all functions, or by function. operator: its name, if not the family's; of_options: the options that it takes, if not all. words: by
    function, as in Caller.
    """
    name = operator or family.operator
    first, *others = tables.values()
    not_all_need = [i for table in others for i, name in enumerate(table.names) if name not in table.required]
    asked = tuple(of_options) or options._fields
    rows, said = first.schema(not_all_need), _said(options, asked, first.names)
    named = ["str function"] if others else []
    _library.define(f"{name}({', '.join([*named, *rows, *said, 'bool? pdl'])}) -> ()", tags=torch.Tag.needs_fixed_stride_order)
    op = getattr(torch.ops.ssmgen, name).default

    def dispatch(function: str, given: Sequence[Any], given_options: Any, pdl: bool | None) -> None:
        """Makes the call through torch's dispatcher, which calls `launch` with plain tensors, or traces the call."""
        if others:
            op(function, *given, *_flat(given_options, asked), pdl)
        else:
            op(*given, *_flat(given_options, asked), pdl)

    made: dict[str, Caller] = {}
    for function, table in tables.items():
        views = views_of[function] if isinstance(views_of, Mapping) else views_of
        spoken = words.get(function, {})
        made[function] = Caller(family, function, table.names, table.required, views, reference, partial(dispatch, function), spoken)
    count, known = len(first.names), FastPath()
    (alone, *_) = made.values()

    def received(*args: Any) -> Call:
        """The call with the dispatcher's arguments."""
        caller = made[args[0]] if others else alone
        given, rest = args[len(named) : len(named) + count], args[len(named) + count :]
        return Call(caller, tuple(given), _options(options, asked, iter(rest[:-1])), rest[-1])

    like = len(named) + first.names.index("out" if "out" in first.names else first.names[0])  # all other sizes change with this one

    def launch(*args: Any) -> None:
        if known.latest(args, {}) is not None:
            return
        key, found = known.repeated(args[like], args, {})
        if found is not None:
            return
        call = received(*args)
        plan = known.learn(key, received, args, {}, call) if on_card(call) else call.plan()
        plan()

    def foresee(*args: Any) -> None:
        call = received(*args)
        call.caller.foresee(call.given, call.options, call.pdl)

    for key in ("CUDA", "CPU"):
        _library.impl(name, launch, key)
    torch.library.register_fake(f"ssmgen::{name}", foresee, lib=_library)
    return made
