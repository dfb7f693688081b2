"""The cache of a process: memory, then layers, then a shared store, then the compiler."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import settings
from ..compile import nvrtc
from ..compile.render import render
from ..errors import CacheError, NotBuiltError
from ..spec.kernel import Arch, KernelSpec
from .entry import MAX_HEADER_BYTES, Entry, cache_key
from .layer import Layer
from .process_lock import process_lock
from .remote import SharedStore


class Cache:
    """Memory, then read-only layers, then the user's directory, then a store that machines share, then the compiler."""

    def __init__(self, writable: Path | None, read_only: Iterable[Path] = (), remote: SharedStore | None = None):
        self._memory: dict[str, Entry] = {}
        self._warned: set[Path | None] = set()  # roots; one warning each
        self.unusable = ""  # why nothing can be written
        self._compiler_build: str | None = None
        self.remote = remote
        self._renew_locks()
        _caches.add(self)
        self.writable = None if writable is None else Layer(writable)
        self.read_only = [layer for layer in map(Layer, read_only) if self._usable(layer)]
        if self.writable is None:
            self._warn(None, "there is no home directory. Set SSMGEN_CACHE_DIR.")
        elif not self._usable(self.writable, missing=True):
            self.writable = None

    def _renew_locks(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._mutex = threading.Lock()
        if self.remote:
            self.remote.renew_locks()

    @classmethod
    def from_environment(cls) -> Cache:
        remote = settings.remote()
        return cls(settings.cache_dir(), settings.read_only_layers(), SharedStore(remote) if remote else None)

    def _usable(self, layer: Layer, missing: bool = False) -> bool:
        """Whether its root is trusted, or may be missing and is; else warns. This is a first check: each use checks everything that it
        opens."""
        try:
            with layer.opened(layer.root):
                return True
        except FileNotFoundError:
            if missing:
                return True
            self._warn(layer, "the directory does not exist")
        except CacheError as e:
            self._warn(layer, e)
        return False

    def _warn(self, layer: Layer | None, reason: object) -> None:
        root = layer.root if layer else None
        if root in self._warned:
            return
        self._warned.add(root)
        if layer in (None, self.writable):
            self.unusable = str(reason)
        what = "keeps compiled kernels in memory only" if layer in (None, self.writable) else f"ignores the cache layer {root}"
        warnings.warn(f"ssmgen {what}: {reason}", stacklevel=2)

    @property
    def layers(self) -> list[Layer]:
        return [*self.read_only, *([self.writable] if self.writable else [])]

    def get(self, spec: KernelSpec, arch: Arch) -> tuple[Entry, bool]:
        """(entry, whether it was already there); compiles on a miss.

        Raises SpecError, CompileError, CompilerMissingError, ConfigError; NotBuiltError under SSMGEN_COMPILE=deny.
        """
        key, source = self._key(spec, arch)
        with self._mutex:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if entry := self._look_up(key, source, spec.name, arch):
                return entry, True
            if not self.remote and not settings.may_compile():
                raise NotBuiltError(str(spec), str(arch))
            with process_lock(key):
                entry = self._look_up(key, source, spec.name, arch)  # another process may have just built it
                if entry:
                    return entry, True
                entry, fetched = self._fetched_or_compiled(key, source, spec, arch)
                self._keep(entry)
            return entry, fetched

    def has(self, spec: KernelSpec, arch: Arch) -> bool:
        """Whether a variant is in memory or a directory. Raises the errors of `get` for the spec, and CompilerMissingError."""
        key, source = self._key(spec, arch)
        return self._look_up(key, source, spec.name, arch) is not None

    def _fetched_or_compiled(self, key: str, source: str, spec: KernelSpec, arch: Arch) -> tuple[Entry, bool]:
        if self.remote is None:
            return self._compiled(key, source, spec, arch), False
        if entry := self.remote.fetch(key, spec.name, arch):
            return entry, True
        if not settings.may_compile():
            raise NotBuiltError(str(spec), str(arch))
        with self.remote.turn(key, spec.name, arch) as sent:
            if sent:
                return sent, True
            entry = self._compiled(key, source, spec, arch)
            self.remote.publish(entry)
            return entry, False

    def _compiled(self, key: str, source: str, spec: KernelSpec, arch: Arch) -> Entry:
        done = nvrtc.compile_cubin(source, arch, str(spec))
        return Entry(
            key=key,
            spec=str(spec),
            symbol=spec.name,
            arch=str(arch),
            compiler=self.compiler_build(),
            options=nvrtc.options_for(arch),
            resources=done.resources,
            seconds=done.seconds,
            source=source,
            cubin=done.cubin,
        )

    def _keep(self, entry: Entry) -> None:
        self._memory[entry.key] = entry
        if self.writable:
            try:
                self.writable.write(entry)
            except OSError as e:
                self._warn(self.writable, e)

    def _key(self, spec: KernelSpec, arch: Arch) -> tuple[str, str]:
        source = render(spec, arch)
        return cache_key(source, nvrtc.options_for(arch), arch, self.compiler_build()), source

    def _look_up(self, key: str, source: str, symbol: str, arch: Arch) -> Entry | None:
        if entry := self._memory.get(key):
            return entry
        for layer in self.layers:
            try:
                entry = layer.load(layer.path(key, arch))
            except (FileNotFoundError, ValueError):
                continue  # a damaged entry is replaced by the next write
            except CacheError as e:
                self._warn(layer, e)
                continue
            if (entry.source, entry.symbol) == (source, symbol):
                self._memory[key] = entry
                return entry
        return None

    def compiler_build(self) -> str:
        """NVRTC's build id, stored next to the entries so that a warm start saves the 120 ms of asking NVRTC."""
        if self._compiler_build is None:
            self._compiler_build = self._remembered_build() or self._ask_build()
        return self._compiler_build

    def _build_note(self) -> tuple[Layer, Path, str] | None:
        """(layer, file in it, identity of the library in use); None if nothing can be kept."""
        if not self.writable:
            return None
        path = nvrtc.library_path()
        try:
            info = os.stat(path)
        except OSError:
            return None
        identity = f"{path}\n{info.st_size}\n{info.st_mtime_ns}"
        return self.writable, self.writable.version_dir / f"nvrtc-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json", identity

    def _remembered_build(self) -> str | None:
        if note := self._build_note():
            layer, path, identity = note
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                told = json.loads(layer.read_file(path, MAX_HEADER_BYTES))
                build = told["build"]
                if told["library"] == identity and isinstance(build, str) and build.strip() and build.isascii() and build.isprintable():
                    return build
        return None

    def _ask_build(self) -> str:
        build = nvrtc.build_id()
        if note := self._build_note():
            layer, path, identity = note
            try:
                layer.publish(path, json.dumps({"library": identity, "build": build}).encode())
            except CacheError as e:
                self._warn(layer, e)
        return build


_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
_shared: tuple[tuple[Any, ...], Cache] | None = None
_shared_mutex = threading.Lock()


def shared_cache() -> Cache:
    """The process's cache; rebuilt when the environment variables that configure it change."""
    global _shared
    described = (settings.cache_dir(), tuple(settings.read_only_layers()), settings.remote())
    with _shared_mutex:
        if _shared is None or _shared[0] != described:
            _shared = described, Cache.from_environment()
        return _shared[1]


def _renew_locks_in_child() -> None:
    """Replaces locks in a forked child: locks that other threads held at the fork would never be released."""
    global _shared_mutex
    _shared_mutex = threading.Lock()
    for cache in _caches:
        cache._renew_locks()


os.register_at_fork(after_in_child=_renew_locks_in_child)
