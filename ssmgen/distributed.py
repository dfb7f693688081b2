"""Sequences over several GPUs: functions of ssmgen on parts of sequences, which the ranks of a process group have one behind the other.

`ssmgen.distributed.NAME(…, group=None)` takes this rank's tokens and the other arguments of `ssmgen.NAME`, and returns this rank's output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .family import public_names

__all__ = ["functions"]


def functions() -> list[str]:
    """Names of the functions that there are here."""
    return sorted(_rules())


def _rules() -> dict[str, Any]:
    from .calls.context_rules import RULES

    return RULES


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_") or name not in _rules():
        there = "" if name.startswith("_") else f"; it has {', '.join(functions())}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{there}")
    globals()[name] = found = _over_ranks(name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *functions()})


def _over_ranks(name: str) -> Callable[..., Any]:
    family, place = public_names()[name]
    function, rule = family.part(place), _rules()[name]

    @functools.wraps(function)
    def run(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        from .calls import context, sharded
        from .errors import ArgumentError

        args, kwargs = function.scalars.checked(args, kwargs)
        given = dict(zip(function.names, args, strict=False)) | kwargs
        if sharded.is_sharded(given.values()):
            raise ArgumentError(f"distributed.{name}", [f"it takes this rank's tensors; ssmgen.{name} itself takes DTensors"])
        return context.run(function, rule, given, group)

    return run
