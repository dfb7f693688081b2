"""Lets processes on one machine share a compilation. It only saves time: without a lock, each of them compiles.

A lock is a file held with flock, so it ends with its holder. The holder removes the file before it unlocks. A process that waited for the
lock then finds that the file has no name, and takes the lock of the new file. Files of killed holders are removed by the next holder, or by
`ssmgen cache gc`.
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

_descriptors: set[int] = set()  # of this process: a forked child shares their locks, and must not keep them held


@contextlib.contextmanager
def process_lock(key: str) -> Iterator[None]:
    """Waits for LOCK_SECONDS at most, then goes on without the lock."""
    path = _path(key)
    descriptor = path and _take(path, LOCK_SECONDS)
    try:
        yield
    finally:
        if path and descriptor in _descriptors:  # not in a child forked since then: the lock is its parent's
            _remove(path)
            _close(descriptor)


def sweep() -> int:
    """Removes the lock files of killed holders; returns their number."""
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
    """A descriptor that holds the lock; None if that takes longer or fails."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError:
            return None
        _descriptors.add(descriptor)
        try:
            os.fchmod(descriptor, 0o600)  # a umask may have removed the owner's permissions
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
        _close(descriptor)  # its holder has removed it: there is, or will be, a new file of this name


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
        return  # closed in a child that a signal handler forked
    _descriptors.discard(descriptor)  # first: once closed, the number may belong to another file, and a fork may happen at any time
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked just before may still have it open
    os.close(descriptor)


def _close_in_child() -> None:
    while _descriptors:
        os.close(_descriptors.pop())  # without unlocking: the lock is the parent's


os.register_at_fork(after_in_child=_close_in_child)
