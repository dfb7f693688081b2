"""One directory of entries: <root>/v1/<arch>/<2 hex digits>/<key>.ssmgen"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CacheError
from ..spec.kernel import Arch
from .entry import MAX_BYTES, SCHEMA, Entry
from .trust import doubt, open_directory, opened, publish, read_file, sentence

SUFFIX = ".ssmgen"
TEMPORARY = ".tmp-"
STALE_SECONDS = 3600.0  # an older temporary file belongs to a process that died; writing one takes milliseconds
_LEAF = 3  # levels from the root to the directories of entries


@dataclass(frozen=True, slots=True)
class Place:
    """A directory of a layer, found while listing it. The descriptor stays open until the next one is requested."""

    path: Path
    depth: int
    descriptor: int | None  # None: it cannot be opened
    wrong: str | None  # why nothing in it is trusted


class Layer:
    """A directory of entries, which may be writable. Nothing is kept open, and every use checks trust again."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.version_dir = self.root / f"v{SCHEMA}"

    def path(self, key: str, arch: Arch | str) -> Path:
        return self.version_dir / str(arch) / key[:2] / (key + SUFFIX)

    def opened(self, directory: Path, make: bool = False, believe: bool = False) -> contextlib.AbstractContextManager[int]:
        """A descriptor of a directory of this layer; see `trust.opened`."""
        return opened(self.root, *directory.relative_to(self.root).parts, make=make, believe=believe)

    def read(self, key: str, arch: Arch) -> Entry | None:
        """The verified entry, or None if it is absent or unusable; `load` gives the reason."""
        with contextlib.suppress(OSError, ValueError):
            return self.load(self.path(key, arch))
        return None

    def load(self, path: Path) -> Entry:
        """The entry in one of this layer's files.

        Raises FileNotFoundError; ValueError, in words, unless it is a whole entry of this name that only this user or root can have
        written; CacheError for an untrusted directory or an unreadable file.
        """
        entry = Entry.from_bytes(self.read_file(path, MAX_BYTES))
        if self.path(entry.key, entry.arch) != path:
            raise ValueError("has the contents of an entry with another name")
        return entry

    def read_file(self, path: Path, limit: int) -> bytes:
        """Raises as `load` does."""
        with self.opened(path.parent) as directory:
            try:
                return read_file(path.name, directory, limit)
            except FileNotFoundError:
                raise
            except OSError as e:
                raise CacheError(path, f"cannot be read: {sentence(e)}") from e

    def write(self, entry: Entry, durable: bool = True) -> None:
        """Publishes an entry. Raises CacheError, which names the file or directory and the reason; the entry is then not visible."""
        self.publish(self.path(entry.key, entry.arch), entry.to_bytes(), durable)

    def publish(self, path: Path, data: bytes, durable: bool = True) -> None:
        """Writes one of this layer's files atomically. Raises CacheError as `write` does. durable: as in `trust.publish`."""
        if len(data) > MAX_BYTES:
            raise CacheError(path, f"cannot be written: it has {len(data)} bytes; expected at most {MAX_BYTES}")
        with self.opened(path.parent, make=True) as directory:
            try:
                publish(path.name, directory, data, TEMPORARY, durable)
            except OSError as e:
                raise CacheError(path, f"cannot be written: {sentence(e)}") from e
            _sweep(directory, STALE_SECONDS)

    def remove(self, path: Path) -> None:
        """Removes a file or empty directory with the name of an entry. Does not follow links, and keeps directories with content.

        Raises FileNotFoundError, and CacheError if it cannot be removed.
        """
        with self.opened(path.parent, believe=True) as directory:
            try:
                try:
                    os.unlink(path.name, dir_fd=directory)
                except IsADirectoryError:
                    os.rmdir(path.name, dir_fd=directory)
            except FileNotFoundError:
                raise
            except OSError as e:
                raise CacheError(path, f"cannot be removed: {sentence(e)}") from e

    def places(self) -> Iterator[Place]:
        """The directories of this layer from the root down, trusted or not. Links instead of directories are listed and not followed."""
        yield from self._places(self.root, 0, None, None)

    def _places(self, path: Path, depth: int, parent: int | None, above: str | None) -> Iterator[Place]:
        try:
            descriptor = open_directory(path, parent)
        except FileNotFoundError:
            return
        except CacheError as e:
            yield Place(path, depth, None, e.reason)
            return
        try:
            wrong = above or doubt(os.fstat(descriptor))
            yield Place(path, depth, descriptor, wrong)
            names = [] if depth == _LEAF else sorted(os.listdir(descriptor)) if depth else [self.version_dir.name]
            for name in names:
                if _may_be_directory(name, descriptor):
                    below = f"lies in {path}, which {wrong}" if wrong and not above else above
                    yield from self._places(path / name, depth + 1, descriptor, below)
        finally:
            os.close(descriptor)

    def files(self) -> Iterator[Path]:
        """All paths with the name and place of an entry."""
        for place in self.places():
            if place.depth == _LEAF and place.descriptor is not None:
                yield from (place.path / name for name in sorted(os.listdir(place.descriptor)) if name.endswith(SUFFIX))

    def entries(self) -> Iterator[tuple[Path, Entry]]:
        """(file, entry) of every usable entry."""
        for path in self.files():
            with contextlib.suppress(OSError, ValueError):
                yield path, self.load(path)

    def sweep(self, older_than: float = STALE_SECONDS) -> int:
        """Removes temporary files of processes that died; the number removed."""
        return sum(_sweep(place.descriptor, older_than) for place in self.places() if place.depth and place.descriptor is not None)


def _may_be_directory(name: str, parent: int) -> bool:
    """Also true for links, which may look like directories."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _sweep(directory: int, older_than: float) -> int:
    removed = 0
    for name in os.listdir(directory):
        if name.startswith(TEMPORARY):
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime <= time.time() - older_than:
                    os.unlink(name, dir_fd=directory)
                    removed += 1
    return removed
