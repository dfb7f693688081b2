"""Finds and removes entries that cannot be used, and the oldest entries above a size limit."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..errors import CacheError, bullets
from .layer import STALE_SECONDS, Layer

OBJECTS = "emulator"  # directory of the emulator's compiled kernels; the layer of cubins never looks into it


def objects(root: Path) -> Layer:
    """The emulator's compiled kernels in a cache's directory."""
    return Layer(root / OBJECTS)


def verify(layer: Layer) -> list[tuple[Path, str]]:
    """(file or directory, its problem) for every unusable entry or directory of entries."""
    wrong = [(place.path, place.wrong) for place in layer.places() if place.wrong]
    for path in layer.files():
        try:
            layer.load(path)
        except FileNotFoundError:
            continue  # another process has just removed it
        except (OSError, ValueError) as e:
            wrong.append((path, str(e)))
    return wrong


def collect_garbage(layer: Layer, max_bytes: float, stale_seconds: float = STALE_SECONDS) -> tuple[int, int]:
    """Removes damaged entries, then the least recently changed ones, until `max_bytes` remain: (files removed, bytes removed).

    Also removes temporary files older than `stale_seconds`. Raises CacheError that lists the files that could not be removed, after
    removing the rest.
    """
    removed = freed = 0
    sizes = []
    damaged = {path for path, _ in verify(layer)}
    for path in layer.files():
        with contextlib.suppress(OSError):
            info = path.lstat()
            sizes.append((path not in damaged, info.st_mtime, info.st_size, path))
    total = sum(size for *_, size, _ in sizes)
    left = []
    for sound, _, size, path in sorted(sizes):
        if sound and total <= max_bytes:
            break
        try:
            layer.remove(path)
            removed, freed, total = removed + 1, freed + size, total - size
        except FileNotFoundError:
            total -= size  # another process was first
        except CacheError as e:
            left.append(str(e))
    removed += layer.sweep(stale_seconds)
    if left:
        raise CacheError(layer.root, f"has {len(left)} files that could not be removed ({removed} were):\n{bullets(left)}")
    return removed, freed
