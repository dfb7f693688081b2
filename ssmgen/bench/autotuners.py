"""How long Triton's autotuners in the peers time each choice.

An autotuner times all configurations of a kernel at the first call of each shape, and Triton takes 125 ms for each. A prompt of
flash-linear-attention has up to eight such kernels with dozens of configurations, so a first call takes half a minute.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

WARMUP_MS, TIMED_MS = 5, 20  # of each configuration: 100 launches of a kernel of 100 us with a cleared cache


@contextlib.contextmanager
def shorter() -> Iterator[None]:
    """Autotuners of this process time each configuration for 20 ms inside."""
    testing = _testing()
    if testing is None:
        yield
        return
    whole = testing.do_bench
    testing.do_bench = functools.partial(whole, warmup=WARMUP_MS, rep=TIMED_MS)
    try:
        yield
    finally:
        testing.do_bench = whole


def untimed() -> None:
    """Autotuners of this process launch each configuration once and take any, for a process that only compiles."""
    testing = _testing()
    if testing is not None:
        testing.do_bench = _launched


def _launched(launch: Callable[[], object], *_: Any, quantiles: Sequence[float] | None = None, **__: Any) -> float | list[float]:
    launch()
    return 1.0 if quantiles is None else [1.0] * len(quantiles)


def _testing() -> Any:
    """Triton's module whose do_bench its autotuners call; None without Triton."""
    try:
        return importlib.import_module("triton.testing")
    except ImportError:
        return None
