"""Counts of the calls that ssmgen's functions take in an engine."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ssmgen.compat.shared.replacing import NotReplaced


class Calls:
    """taken, refused: {function: calls} that ssmgen served, and that raised an error, after which the engine's own function ran.

    A CUDA graph's function is called for its warm-up and its capture, not for a replay.
    """

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def count(self, plugin: Any) -> None:
        """Counts the calls of functions of a plugin, vllm or sglang of ssmgen.compat, from now on. Before the engine loads the plugin."""
        plugin._ENGINE.replacements = tuple(
            r if r.around else replace(r, function=counted(r.function, r.name, self.taken, self.refused))
            for r in plugin._ENGINE.replacements
        )


def counted(function: Callable[..., Any], name: str, taken: Counter[str], refused: Counter[str]) -> Callable[..., Any]:
    """The function, which adds its calls to one of the two: to `refused` where it raises, to neither where it leaves them to the engine."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls: Counter[str] | None = refused
        try:
            result = function(*args, **kwargs)
            calls = taken
        except NotReplaced:
            calls = None
            raise
        finally:
            if calls is not None:
                calls[name] += 1
        return result

    return call
