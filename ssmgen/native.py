"""ssmgen-native: what is done in calls that come again, in C++. Without it the same is done in Python, with the same results."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from . import __version__, settings


@functools.cache
def found() -> Any:
    """The module, if it is installed and fits; else None, with a warning where it does not fit. Raises ConfigError."""
    if not settings.may_be_native():
        return None
    try:
        import ssmgen_native
    except ModuleNotFoundError:
        return None
    except ImportError as e:  # of another build of torch
        return _left_out(str(e))
    built, here = (ssmgen_native.ssmgen_version, ssmgen_native.torch_version), (__version__, torch.__version__)
    return ssmgen_native if built == here else _left_out("it was built for ssmgen {} and torch {}, not for {} and {}".format(*built, *here))


def _left_out(why: str) -> None:
    warnings.warn(f"ssmgen-native is left out: {why}", RuntimeWarning, stacklevel=3)
