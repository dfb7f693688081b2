"""Compiled kernels and the machine, kept for later processes in `emulator/` of the cache's directory.

They are code, so they lie under the checks of cubins: files and directories of this user or root alone, published at once, and an entry
that holds its own digest and lies under the hash of its text, flags and compiler. Where nothing can be kept, each process compiles.
"""

from __future__ import annotations

import functools
import subprocess
import warnings
from pathlib import Path

from .. import settings
from ..compile.nvrtc import Resources
from ..errors import CacheError
from ..spec.kernel import Arch
from .entry import Entry, cache_key
from .layer import Layer
from .upkeep import objects

_ARCH = Arch(80)  # entries name one; portable bodies serve all


@functools.cache
def compiler() -> str:
    """The version and the target of g++, in its own words."""
    asked = (subprocess.run(["g++", how], capture_output=True, text=True, check=True) for how in ("--version", "-dumpmachine"))
    return " ".join(done.stdout.splitlines()[0].strip() for done in asked)


def read(text: str, symbol: str, flags: tuple[str, ...]) -> bytes | None:
    """The library that such a text was compiled to, or None."""
    if (place := _layer()) is None:
        return None
    entry = place.read(cache_key(text, (*flags, symbol), _ARCH, compiler()), _ARCH)
    return entry.cubin if entry else None


def keep(text: str, symbol: str, flags: tuple[str, ...], library: bytes, seconds: float) -> None:
    """Publishes a library for later processes. A directory that cannot be written is said once."""
    if (place := _layer()) is None:
        return
    options = (*flags, symbol)
    key = cache_key(text, options, _ARCH, compiler())
    try:
        entry = Entry(key, symbol, symbol, str(_ARCH), compiler(), options, Resources(0, 0, 0, 0, 0), seconds, text, library)
        place.write(entry, durable=False)  # a damaged one is compiled again
    except CacheError as e:
        _warn(place.root, str(e))


@functools.cache
def _warn(root: Path, reason: str) -> None:
    warnings.warn(f"ssmgen keeps no compiled kernels of the emulator in {root}: {reason}", stacklevel=2)


def _layer() -> Layer | None:
    directory = settings.cache_dir()
    return objects(directory) if directory else None
