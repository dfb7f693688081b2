"""Functions over whole sequences whose tokens lie on several ranks of a process group, one rank's behind the other's.

`ssmgen.distributed.NAME(…, group=None)` takes the arguments of `ssmgen.NAME` and returns what it does, of this rank's tokens:

group: a torch.distributed.ProcessGroup, whose ranks all make the call; None for all processes
tokens: this rank's, as many as it has; those of rank 0 come first. Other arguments are the same on all ranks, and of the same kinds
cu_seqlens (query_start_loc): where sequences start among the tokens of all ranks
initial_states: [sequences, …], of all sequences
return_final_states: also return the final states of all sequences, on all ranks
pools, checkpoints and seq_idx are refused

The results are those of one device but for the order in which f32 sums are made. Raises ArgumentError listing all that is wrong, before
anything is launched or communicated, and what the function raises. A guide of its own says what is communicated, and what this can gain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .spec.family import public_names

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
