"""Keeps the emulator's compiled kernels and machine for later processes, in `emulator/` of the cache's directory.

They are code, so the same checks apply as for cubins. Only this user and root may own files and directories. Files are published
atomically. An entry contains its own digest, and its name is the hash of its text, flags and compiler. If nothing can be kept, each process
compiles.
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

_ARCH = Arch(80)  # entries must name an architecture; host libraries serve all of them


@functools.cache
def compiler() -> str:
    """The version and the target of g++, from its output."""
    asked = (subprocess.run(["g++", how], capture_output=True, text=True, check=True) for how in ("--version", "-dumpmachine"))
    return " ".join(done.stdout.splitlines()[0].strip() for done in asked)


def read(text: str, symbol: str, flags: tuple[str, ...]) -> bytes | None:
    """The library compiled from this text, or None."""
    if (place := _layer()) is None:
        return None
    entry = place.read(cache_key(text, (*flags, symbol), _ARCH, compiler()), _ARCH)
    return entry.cubin if entry else None


def keep(text: str, symbol: str, flags: tuple[str, ...], library: bytes, seconds: float) -> None:
    """Publishes a library for later processes. Warns once if the directory cannot be written."""
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
    warnings.warn(f"ssmgen does not keep compiled kernels of the emulator, since {root} cannot be used: {reason}", stacklevel=2)


def _layer() -> Layer | None:
    directory = settings.cache_dir()
    return objects(directory) if directory else None
