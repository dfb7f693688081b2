"""ssmgen-native, if it is installed: what is done in calls that come again, in C++. Python does the same without it, in more time."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from . import __version__, settings


@functools.cache
def found() -> Any:
    """Its module; None where calls do without it, with a warning if that is because it does not fit. Raises ConfigError."""
    module, why = _look()
    if why.startswith("left out"):
        warnings.warn(f"ssmgen-native is {why}", RuntimeWarning, stacklevel=2)
    return module


def state() -> str:
    """Whether calls use it, and why they do not. Raises ConfigError."""
    return _look()[1]


def _look() -> tuple[Any, str]:
    if not settings.may_be_native():
        return None, "denied by SSMGEN_NATIVE"
    try:
        import ssmgen_native as module
    except ModuleNotFoundError:
        return None, "not installed"
    except ImportError as e:  # of a torch with other symbols
        return None, f"left out: {e}"
    built, here = (module.ssmgen_version, module.torch_version), (__version__, torch.__version__)
    if built != here:
        return None, "left out: it was built for ssmgen {} and torch {}, not for {} and {}".format(*built, *here)
    return module, f"{__version__}, used"
