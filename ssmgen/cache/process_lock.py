"""Saves the other processes of a machine the same compilation. Needed for nothing: without a lock, each of them compiles.

A lock is a file held with flock, so it dies with its holder. Its holder removes it before letting go; who waited for it then finds that
it has no name any more, and takes the one that has. What a killed holder leaves is removed by the next one, or by `ssmgen cache gc`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .trust import make_one

LOCK_SECONDS = 30.0  # longest wait for another process's compilation; then this one compiles too
SUFFIX = ".lock"

_descriptors: set[int] = set()  # of this process: a forked child shares the locks behind them, and must not keep them alive


@contextlib.contextmanager
def process_lock(key: str) -> Iterator[None]:
    """Waits for LOCK_SECONDS at most, then goes on without the lock."""
    path = _path(key)
    descriptor = path and _take(path, LOCK_SECONDS)
    try:
        yield
    finally:
        if path and descriptor in _descriptors:  # not in a child that was forked meanwhile: the lock is its parent's
            _remove(path)
            _close(descriptor)


def sweep() -> int:
    """Removes the files of holders that were killed; the number removed."""
    directory, removed = lock_dir(), 0
    for path in sorted(directory.glob(f"*{SUFFIX}")) if directory else []:
        if (descriptor := _take(path, 0.0)) is not None:
            removed += _remove(path)
            _close(descriptor)
    return removed


def lock_dir() -> Path | None:
    """A directory on this machine (flock on a network file system may hang or do nothing), private to this user."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm", tempfile.gettempdir()):
        if not base:
            continue
        path = Path(base) / f"ssmgen-locks-{os.geteuid()}"
        with contextlib.suppress(OSError):
            make_one(path)
            info = path.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022 and os.access(path, os.W_OK):
                return path
    return None


def _path(key: str) -> Path | None:
    directory = lock_dir()
    return directory and directory / (key[:32] + SUFFIX)


def _take(path: Path, seconds: float) -> int | None:
    """A descriptor that holds the lock; None if that takes longer or cannot be."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError:
            return None
        _descriptors.add(descriptor)
        try:
            os.fchmod(descriptor, 0o600)  # a umask may have taken from the owner
            while not _locked(descriptor):
                if time.monotonic() >= deadline:
                    _close(descriptor)
                    return None
                time.sleep(0.005)
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        except FileNotFoundError:
            pass
        except OSError:
            _close(descriptor)
            return None
        _close(descriptor)  # its holder has removed it: there is, or will be, another of this name


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False


def _close(descriptor: int) -> None:
    if descriptor not in _descriptors:
        return  # closed in a child that was forked by a signal's handler
    _descriptors.discard(descriptor)  # first: once closed, the number may be another file's, and a fork may happen at any time
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked just before may still have it open
    os.close(descriptor)


def _close_in_child() -> None:
    while _descriptors:
        os.close(_descriptors.pop())  # and not unlock: the lock is the parent's


os.register_at_fork(after_in_child=_close_in_child)
