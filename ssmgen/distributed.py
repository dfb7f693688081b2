"""Context parallelism: functions over whole sequences that are split along their tokens over the ranks of a process group.

`ssmgen.distributed.NAME(…, group=None)` takes the arguments of `ssmgen.NAME` and returns its result for this rank's tokens:

group: a torch.distributed.ProcessGroup, whose ranks all make the call; None for all processes
tokens: this rank's tokens, any number of them, in rank order. Other arguments are equal on all ranks, and of the same kinds
cu_seqlens (query_start_loc): where sequences start among the tokens of all ranks
initial_states: [sequences, …], of all sequences
return_final_states: also return the final states of all sequences, on all ranks
pools, checkpoints and seq_idx are refused

The results equal one device's, except for the order of f32 sums. Raises ArgumentError listing all problems, before anything is launched
or communicated, and the errors of the function. A separate guide describes the communication and the possible gain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .spec.family import parts, public_names

__all__ = ["functions"]


def functions() -> list[str]:
    """Names of the functions in this module."""
    return sorted(parts("context"))


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_") or name not in parts("context"):
        there = "" if name.startswith("_") else f"; it has {', '.join(functions())}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{there}")
    globals()[name] = found = _over_ranks(name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *functions()})


def _over_ranks(name: str) -> Callable[..., Any]:
    family, place = public_names()[name]
    function, rule = family.part(place), parts("context")[name]

    @functools.wraps(function)
    def run(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        from .calls import context, sharded
        from .errors import ArgumentError

        args, kwargs = function.scalars.checked(args, kwargs)
        given = dict(zip(function.names, args, strict=False)) | kwargs
        if sharded.is_sharded(given.values()):
            raise ArgumentError(
                f"distributed.{name}",
                [f"an argument is a DTensor; expected this rank's tensors. Pass DTensor.to_local(), or call ssmgen.{name}."],
            )
        return context.run(function, rule, given, group)

    return run
