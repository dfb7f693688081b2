"""Files and directories that only this user and root may have written.

A cubin is code, so owner and mode are checked each time, on the same descriptor that is then read or written: the file at
a path may have been replaced since. The cache's root may be a link that the user made; below it no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from ..errors import CacheError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO must not wait for its writer
_LINK = "is a symbolic link, which ssmgen does not follow below the root of a cache"


def doubt(info: os.stat_result) -> str | None:
    """Why a file or directory with this owner and mode is not trusted, or None."""
    if info.st_uid not in (0, os.geteuid()):
        return f"belongs to user {info.st_uid}"
    if info.st_mode & stat.S_IWOTH:
        return "is writable by everyone"
    return None


def distrust(path: Path) -> str | None:
    """Why a directory must not be used, or None: only this user and root may own it, and not everyone may write there."""
    try:
        with opened(path):
            return None
    except OSError as e:
        return str(e)


def make_private(path: Path) -> None:
    """Makes a directory and its missing parents, each with mode 0700 whatever the umask. Raises OSError."""
    for directory in reversed([path, *takewhile(lambda parent: not parent.exists(), path.parents)]):
        make_one(directory)


def make_one(path: Path | str, parent: int | None = None) -> None:
    """Makes a directory with mode 0700, unless the name is taken. Raises OSError."""
    try:
        os.mkdir(path, 0o700, dir_fd=parent)
    except FileExistsError:
        return
    if os.stat(path, dir_fd=parent, follow_symlinks=False).st_mode & 0o700 != 0o700:  # the umask removed the owner's permissions too
        os.chmod(path, 0o700, dir_fd=parent)


@contextlib.contextmanager
def opened(root: Path, *below: str, make: bool = False, believe: bool = False) -> Iterator[int]:
    """A descriptor of the directory root/below/…, with every level checked.

    make: missing levels are made. believe: owners and modes are not checked (to remove things).
    Raises FileNotFoundError if it does not exist, else CacheError that names the level and its problem.
    """
    with contextlib.ExitStack() as levels:
        path, fd = root, open_directory(root, None, make)
        for name in (*below, None):
            levels.callback(os.close, fd)
            if not believe and (reason := doubt(os.fstat(fd))):
                raise CacheError(path, reason)
            if name is not None:
                path = path / name
                fd = open_directory(path, fd, make)
        yield fd


def open_directory(path: Path, parent: int | None, make: bool = False) -> int:
    """A descriptor of a directory: of a cache's root, or of the directory with that name in `parent`. Raises as `opened` does."""
    name, flags = (path, _DIRECTORY) if parent is None else (path.name, _DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            return os.open(name, flags, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
        if parent is None:
            make_private(path)
        else:
            make_one(name, parent)
        return os.open(name, flags, dir_fd=parent)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        if isinstance(e, FileNotFoundError) and not make:
            raise
        if parent is not None and os.path.islink(path):
            raise CacheError(path, _LINK) from e
        raise CacheError(path, f"cannot be {'made' if make else 'opened'}: {sentence(e)}") from e


def read_file(name: str, directory: int, limit: int) -> bytes:
    """A regular file of this user or of root, of at most `limit` bytes. Raises OSError; ValueError, in words, for anything else."""
    try:
        fd = os.open(name, _FILE, dir_fd=directory)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENXIO):
            raise ValueError(_LINK if e.errno == errno.ELOOP else "is not a regular file") from e
        raise
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError("is not a regular file")
        if reason := doubt(info):
            raise ValueError(reason)
        if info.st_size > limit:
            raise ValueError(f"has {info.st_size} bytes; expected at most {limit}")
        with open(fd, "rb", closefd=False) as file:
            return file.read(info.st_size)
    finally:
        os.close(fd)


def publish(name: str, directory: int, data: bytes, prefix: str, durable: bool = True) -> None:
    """Writes a file atomically: a reader sees the old one or the new one. Raises OSError; nothing is then visible.

    durable: waits until the file is on disk, some 8 ms; else a crash of the machine may leave a damaged file.
    """
    temporary = prefix + os.urandom(8).hex()
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # a umask may have removed the owner's permissions
            file.write(data)
            file.flush()
            if durable:
                os.fsync(fd)
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


def sentence(error: Exception) -> str:
    """The text of a system exception, without its number and path."""
    return getattr(error, "strerror", None) or str(error)
