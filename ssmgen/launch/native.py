"""ssmgen-native, if it is installed: what is done in calls that come again, in C++. Python does the same without it, in more time."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

from .. import __version__, settings


class Native(Protocol):
    """What of it is asked for, each by the function that does the same in Python."""

    Enqueue: Callable[..., Callable[[], int]]  # enqueue.enqueuing
    Plan: Callable[..., Callable[[], None]]  # runtime.plan_of
    Row: Callable[..., Callable[..., Any]]  # calls.fast_path.row_of


@functools.cache
def found() -> Native | None:
    """Its module; None where calls do without it, with a warning if that is because it does not fit. Raises ConfigError."""
    module, why = _look()
    if why.startswith("left out"):
        warnings.warn(f"ssmgen-native is {why}", RuntimeWarning, stacklevel=2)
    return module


def state() -> str:
    """Whether calls use it, and why they do not. Raises ConfigError."""
    return _look()[1]


def _look() -> tuple[Native | None, str]:
    if not settings.may_be_native():
        return None, "denied by SSMGEN_NATIVE"
    if find_spec("ssmgen_native") is None:
        return None, "not installed"
    import torch  # ahead of it: the libraries that it needs are torch's

    try:
        import ssmgen_native as module
    except ImportError as e:  # a torch with other symbols
        return None, f"left out: {e}"
    built, here = (module.ssmgen_version, module.torch_version), (__version__, torch.__version__)
    if built != here:
        return None, "left out: it was built for ssmgen {} and torch {}, not for {} and {}".format(*built, *here)
    return module, f"{__version__}, used"
