"""The engines' batch-invariant modes: whether one is on in this process, and where a prompt may be cut in it.

A sequence's bits then depend on its own tokens only: not on other requests, on the scheduler's pieces, or on cached prefixes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

CHUNK = 64  # tokens: prompts cut at multiples of it, from the sequence's start, have the bits of whole ones
MAMBA1 = 4  # the same for Mamba-1


class Mode:
    """Whether an engine in this process is in its batch-invariant mode. read: asked until it knows, which is until it is not None."""

    def __init__(self, read: Callable[[], bool | None]):
        self.read = read
        self.known: bool | None = None

    def __call__(self) -> bool:
        if self.known is None:
            self.known = self.read()
        return bool(self.known)

    def watch(self, watched: bool) -> None:
        """Makes `on` ask this mode, or not; it is read again in either case."""
        self.known = None
        if self in _WATCHED:
            _WATCHED.remove(self)
        if watched:
            _WATCHED.append(self)


_WATCHED: list[Mode] = []  # of engines whose plugin is registered


def on() -> bool:
    """Whether an engine in this process is in its batch-invariant mode."""
    for mode in _WATCHED:  # noqa: SIM110 - each prompt asks, and any() would take 0.3 us more
        if mode():
            return True
    return False


def whole(function: Callable[..., Any]) -> dict[str, Any]:
    """The options that make a prompt function keep each sequence whole in that mode. Otherwise it may sum long sequences in segments, whose
    number follows from the length of the call's piece."""
    return {"segments": 1} if on() and _has_segments(function) else {}


@cache
def _has_segments(function: Callable[..., Any]) -> bool:
    return "segments" in inspect.signature(function).parameters


def one_function_for_both() -> list[str]:
    """The reason why a function of prompts and decode steps refuses calls in that mode."""
    words = "prompts and decode steps are one function here, told apart by the number of tokens of all requests in the step"
    return [words] if on() else []


def piece_end(start: int, end: int, limit: int, prompt: int, grid: int) -> int:
    """The end of a piece of a sequence, in tokens of the sequence.

    start: tokens before the piece   prompt: the prompt's tokens   end: the scheduler's choice   limit: the largest end within its budget
    grid: tokens; a prompt is cut at multiples of it
    A piece of a prompt ends at such a multiple or at the prompt's end. It leaves no rest of one token, which would run as a decode step and
    have other bits. Single tokens follow the prompt: outputs that are computed again ran as decode steps the first time, too.
    Returns `start` if the piece has to wait for a larger budget.
    """
    if start >= prompt:
        return min(end, start + 1)
    if end >= prompt:
        return prompt
    end -= end % grid
    if prompt - end == 1:
        end = prompt if limit >= prompt else end - grid
    return max(end, start)
