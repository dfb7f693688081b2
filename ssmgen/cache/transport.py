"""Requests to a shared store, through fsspec. Each ends, or is abandoned, within a time limit; all failures become the errors listed
here."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ..errors import RemoteError
from .signing import INSTALL

T = TypeVar("T")


# Clients of the process that this one was forked from, kept forever: a client that is freed here removes its sockets from an epoll instance
# that both processes share, and the parent's next request hangs.
_inherited: list[tuple[int, Any, str]] = []


class Transport(Protocol):
    """The operations of a shared store; paths are below its root. Each may raise RemoteError, within a bounded time."""

    url: str

    def get(self, path: str, limit: int) -> bytes:
        """The first `limit` bytes of an object. Raises FileNotFoundError if there is none."""
        ...

    def put(self, path: str, data: bytes, new: bool = False) -> None:
        """Creates or replaces an object atomically. new: raises FileExistsError if it exists."""
        ...

    def names(self, path: str) -> list[str]:
        """The names directly below a path, sorted; empty if the path does not exist."""
        ...

    def remove(self, path: str) -> None:
        """Removes an object, if it exists."""
        ...


class Fsspec:
    """A store at a URL that fsspec supports.

    A request that takes longer than `seconds` is left to its thread, which is not waited for: a hang in a library or in the system's
    kernel cannot be ended from outside. Imports and the construction of the client are not counted.
    """

    def __init__(self, url: str, seconds: float):
        self.url, self.seconds = url.rstrip("/"), seconds
        self._made: tuple[int, Any, str] | None = None
        self._mutex = threading.Lock()

    def get(self, path: str, limit: int) -> bytes:
        def request(system: Any, full: str) -> bytes:
            data: bytes = system.cat_file(full, start=0, end=limit)
            return data

        return self._asked("read", path, request)

    def put(self, path: str, data: bytes, new: bool = False) -> None:
        def request(system: Any, full: str) -> None:
            if new and self.local:  # fsspec checks first and then writes
                os.makedirs(os.path.dirname(full), exist_ok=True)
                with open(full, "xb") as file:
                    file.write(data)
            elif new:
                system.pipe_file(full, data, mode="create")
            elif self.local:  # a write takes time here, and a reader might see half of it
                temporary = f"{full}.tmp-{os.urandom(8).hex()}"
                try:
                    system.pipe_file(temporary, data)
                    os.replace(temporary, full)
                except BaseException:
                    if system.exists(temporary):
                        system.rm_file(temporary)
                    raise
            else:
                system.pipe_file(full, data)

        self._asked("write", path, request)

    def names(self, path: str) -> list[str]:
        def request(system: Any, full: str) -> list[str]:
            try:
                found = system.ls(full, detail=False)
            except FileNotFoundError:
                return []
            names = {item.rstrip("/").rpartition("/")[2] for item in found}
            return sorted(name for name in names if name and ".tmp-" not in name)

        return self._asked("list", path, request)

    def remove(self, path: str) -> None:
        def request(system: Any, full: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(full)

        self._asked("remove", path, request)

    @property
    def local(self) -> bool:
        return self.url.startswith(("file://", "local://"))

    def _asked(self, what: str, path: str, request: Callable[[Any, str], T]) -> T:
        system, root = self._system()
        done: list[T] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                done.append(request(system, f"{root}/{path}"))
            except BaseException as e:  # of any library; the caller's thread interprets it below
                failed.append(e)

        thread = threading.Thread(target=work, name="ssmgen-remote", daemon=True)
        thread.start()
        thread.join(self.seconds)
        if done:
            return done[0]
        place = f"{self.url}/{path}"
        if not failed:
            raise RemoteError(place, f"did not {what} within {self.seconds:g} s")
        (error,) = failed
        if isinstance(error, FileExistsError) or (isinstance(error, FileNotFoundError) and what == "read"):
            raise type(error)(place) from error
        if isinstance(error, Exception):
            raise RemoteError(place, f"did not {what}: {type(error).__name__}: {_first_line(error)}") from error
        raise error

    def _system(self) -> tuple[Any, str]:
        """(file system, root in it), made in the current process: clients do not survive a fork."""
        with self._mutex:
            if self._made is None or self._made[0] != os.getpid():
                if self._made:
                    _inherited.append(self._made)
                try:
                    import fsspec

                    # No cached listings: other processes write too.
                    options = {"auto_mkdir": True} if self.local else {"use_listings_cache": False}
                    system, root = fsspec.core.url_to_fs(self.url, **options)
                except ImportError as e:
                    raise RemoteError(
                        self.url, f"needs a package that is not installed ({_first_line(e)}). Install it with: {INSTALL}"
                    ) from e
                except Exception as e:  # of any library: unknown protocols, credentials, regions
                    raise RemoteError(self.url, f"cannot be opened: {type(e).__name__}: {_first_line(e)}") from e
                self._made = os.getpid(), system, root.rstrip("/")
            return self._made[1], self._made[2]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
