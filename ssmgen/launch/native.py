"""ssmgen-native, if it is installed: C++ versions of functions that run in every repeated call. Python does the same, more slowly."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

from .. import __version__, settings


class Native(Protocol):
    """The functions of the module that are used, each named with its Python counterpart."""

    Enqueue: Callable[..., Callable[[], int]]  # enqueue.enqueuing
    Plan: Callable[..., Callable[[], None]]  # runtime.plan_of
    Row: Callable[..., Callable[..., Any]]  # calls.fast_path.row_of


@functools.cache
def found() -> Native | None:
    """The module; None if calls do not use it, with a warning if it does not fit this installation. Raises ConfigError."""
    module, why = _look()
    if why.startswith("left out"):
        warnings.warn(f"ssmgen-native is {why}", RuntimeWarning, stacklevel=2)
    return module


def state() -> str:
    """Whether calls use it, and if not, why. Raises ConfigError."""
    return _look()[1]


def _look() -> tuple[Native | None, str]:
    if not settings.may_be_native():
        return None, "denied by SSMGEN_NATIVE"
    if find_spec("ssmgen_native") is None:
        return None, "not installed"
    import torch  # first: the module needs torch's libraries

    try:
        import ssmgen_native as module
    except ImportError as e:  # a torch with other symbols
        return None, f"left out: {e}"
    built, here = (module.ssmgen_version, module.torch_version), (__version__, torch.__version__)
    if built != here:
        return None, "left out: it was built for ssmgen {} and torch {}; expected {} and {}. Install it again.".format(*built, *here)
    return module, f"{__version__}, used"
