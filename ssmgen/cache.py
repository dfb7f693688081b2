"""Content-addressed store of cubins.

An entry is one self-verifying file, published with os.replace: a reader sees all of it or none. A truncated or altered entry is a
miss and is replaced. Nothing here is needed for correctness: with no directory, no lock or a full disk, kernels are compiled and
kept in memory. Kernels are always loaded from the bytes in memory, never by re-reading what was just written.

    magic | header length (4 bytes, big endian) | header (JSON) | source | cubin | sha256 of all before it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from . import compile as compiler
from . import config
from .compile import Resources
from .errors import NotBuiltError, SpecError
from .render import render
from .spec import Arch, KernelSpec

SCHEMA = 1
MAGIC = b"SSMGEN1\n"
SUFFIX = ".ssmgen"
LOCK_SECONDS = 30.0  # longest wait for another process's compilation; then this one compiles too
STALE_SECONDS = 3600.0  # a temporary file older than this belongs to a process that died


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel, as stored."""

    key: str
    spec: str
    symbol: str
    arch: str
    compiler: str
    options: tuple[str, ...]
    resources: Resources
    seconds: float  # that compiling took, when it was compiled
    source: str
    cubin: bytes

    def to_bytes(self) -> bytes:
        header = {k: v for k, v in asdict(self).items() if k not in ("source", "cubin")}
        source = self.source.encode()
        header |= {"source_bytes": len(source), "cubin_bytes": len(self.cubin)}
        text = json.dumps(header, sort_keys=True).encode()
        body = MAGIC + len(text).to_bytes(4, "big") + text + source + self.cubin
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """Raises ValueError for anything that `to_bytes` did not write, whole."""
        if len(data) < len(MAGIC) + 36 or data[: len(MAGIC)] != MAGIC:
            raise ValueError("not an ssmgen cache entry")
        body, digest = data[:-32], data[-32:]
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("digest mismatch: truncated or altered")
        start = len(MAGIC) + 4
        end = start + int.from_bytes(data[len(MAGIC) : start], "big")
        header = json.loads(data[start:end])
        source_end = end + header.pop("source_bytes")
        if source_end + header.pop("cubin_bytes") != len(body):
            raise ValueError("lengths do not add up")
        header["resources"] = Resources(**header["resources"])
        header["options"] = tuple(header["options"])
        return cls(**header, source=data[end:source_end].decode(), cubin=data[source_end:-32])


def cache_key(source: str, options: Iterable[str], arch: Arch, compiler_build: str) -> str:
    """sha256 over labelled, length-prefixed fields, so that no two sets of inputs can spell the same bytes."""
    h = hashlib.sha256()
    fields = [("schema", str(SCHEMA)), ("source", source), ("arch", str(arch)), ("compiler", compiler_build)]
    for label, value in [*fields, *(("option", o) for o in options)]:
        for part in (label.encode(), value.encode()):
            h.update(len(part).to_bytes(8, "big") + part)
    return h.hexdigest()


def distrust(path: Path) -> str | None:
    """Why a directory must not be used, or None: a cubin is code, so only this user and root may be able to write there."""
    try:
        info = path.stat()
    except OSError as e:
        return str(e)
    if not stat.S_ISDIR(info.st_mode):
        return f"{path} is not a directory"
    if info.st_uid not in (0, os.getuid()):
        return f"{path} belongs to user {info.st_uid}"
    if info.st_mode & stat.S_IWOTH:
        return f"{path} is writable by everyone"
    return None


class Layer:
    """One directory of entries: <root>/v1/<arch>/<2 hex digits>/<key>.ssmgen"""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.version_dir = self.root / f"v{SCHEMA}"

    def path(self, key: str, arch: Arch | str) -> Path:
        return self.version_dir / str(arch) / key[:2] / (key + SUFFIX)

    def read(self, key: str, arch: Arch) -> Entry | None:
        """The verified entry, or None. A damaged one counts as absent; the next write replaces it."""
        try:
            entry = Entry.from_bytes(self.path(key, arch).read_bytes())
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return entry if entry.key == key and entry.arch == str(arch) else None

    def write(self, entry: Entry) -> None:
        """Publishes an entry. Raises OSError when it cannot; then nothing is visible."""
        path = self.path(entry.key, entry.arch)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if reason := distrust(path.parent):
            raise OSError(reason)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        try:
            with os.fdopen(fd, "wb") as f:
                f.write(entry.to_bytes())
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def files(self) -> Iterator[Path]:
        yield from sorted(self.version_dir.glob(f"*/*/*{SUFFIX}"))

    def entries(self) -> Iterator[tuple[Path, Entry]]:
        """(file, entry) of every one that can be used."""
        for path in self.files():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                yield path, Entry.from_bytes(path.read_bytes())

    def sweep(self) -> int:
        """Removes temporary files of processes that died; the number removed."""
        removed = 0
        for path in self.version_dir.glob("*/*/.tmp-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
                    removed += 1
        return removed


class Cache:
    """Memory, then read-only layers, then the user's directory, then the compiler."""

    def __init__(self, writable: Path | None, read_only: Iterable[Path] = ()):
        self._memory: dict[str, Entry] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._mutex = threading.Lock()
        self._warned = False
        self._compiler_build: str | None = None
        self.read_only = [Layer(p) for p in read_only if self._usable(p)]
        self.writable = None if writable is None else Layer(writable)
        if writable is None:
            self._warn("there is no home directory; set SSMGEN_CACHE_DIR")
        elif writable.exists() and (reason := distrust(writable)):
            self._warn(reason)
            self.writable = None

    @classmethod
    def from_environment(cls) -> Cache:
        return cls(config.cache_dir(), config.read_only_layers())

    def _usable(self, path: Path) -> bool:
        if reason := distrust(path):
            warnings.warn(f"ssmgen ignores the cache layer {path}: {reason}", stacklevel=2)
            return False
        return True

    def _warn(self, reason: object) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"ssmgen keeps compiled kernels in memory only: {reason}", stacklevel=2)

    @property
    def layers(self) -> list[Layer]:
        return [*self.read_only, *([self.writable] if self.writable else [])]

    def get(self, spec: KernelSpec, arch: Arch) -> tuple[Entry, bool]:
        """(entry, whether it was there already); compiles on a miss.

        Raises SpecError, CompileError, CompilerMissingError; NotBuiltError under SSMGEN_COMPILE=deny.
        """
        key, source = self._key(spec, arch)
        with self._mutex:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if entry := self._look_up(key, source, arch):
                return entry, True
            if not config.may_compile():
                raise NotBuiltError(str(spec), str(arch))
            with _process_lock(key):
                entry = self._look_up(key, source, arch)  # another process may have just built it
                if entry:
                    return entry, True
                done = compiler.compile_cubin(source, arch, str(spec))
                entry = Entry(
                    key=key,
                    spec=str(spec),
                    symbol=spec.name,
                    arch=str(arch),
                    compiler=self.compiler_build(),
                    options=compiler.options_for(arch),
                    resources=done.resources,
                    seconds=done.seconds,
                    source=source,
                    cubin=done.cubin,
                )
                self._memory[key] = entry
                if self.writable:
                    try:
                        self.writable.write(entry)
                    except OSError as e:
                        self._warn(e)
            return entry, False

    def _key(self, spec: KernelSpec, arch: Arch) -> tuple[str, str]:
        source = render(spec, arch)
        return cache_key(source, compiler.options_for(arch), arch, self.compiler_build()), source

    def _look_up(self, key: str, source: str, arch: Arch) -> Entry | None:
        if entry := self._memory.get(key):
            return entry
        for layer in self.layers:
            entry = layer.read(key, arch)
            if entry and entry.source == source:
                self._memory[key] = entry
                return entry
        return None

    def compiler_build(self) -> str:
        """NVRTC's build id, remembered next to the entries so that a warm start skips the 120 ms of asking NVRTC."""
        if self._compiler_build is None:
            self._compiler_build = self._remembered_build() or self._ask_build()
        return self._compiler_build

    def _build_note(self) -> tuple[Path, str] | None:
        """(file, identity of the library in use)"""
        if not self.writable:
            return None
        path = compiler.library_path()
        try:
            info = os.stat(path)
        except OSError:
            return None
        identity = f"{path}\n{info.st_size}\n{info.st_mtime_ns}"
        return self.writable.version_dir / f"nvrtc-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json", identity

    def _remembered_build(self) -> str | None:
        if note := self._build_note():
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                told = json.loads(note[0].read_text())
                if told["library"] == note[1] and isinstance(told["build"], str):
                    return told["build"]
        return None

    def _ask_build(self) -> str:
        build = compiler.build_id()
        if note := self._build_note():
            path, identity = note
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
                with os.fdopen(fd, "w") as f:
                    json.dump({"library": identity, "build": build}, f)
                os.replace(temporary, path)
            except OSError as e:
                self._warn(e)
        return build


def _lock_dir() -> Path | None:
    """A directory on this machine (flock on a network file system may hang or do nothing), private to this user."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm", tempfile.gettempdir()):
        if not base:
            continue
        path = Path(base) / f"ssmgen-locks-{os.getuid()}"
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            if path.lstat().st_uid == os.getuid() and not path.is_symlink() and os.access(path, os.W_OK):
                return path
    return None


@contextlib.contextmanager
def _process_lock(key: str) -> Iterator[None]:
    """Saves the other processes the same compilation. Held by the kernel, so it dies with its holder; waited for LOCK_SECONDS."""
    directory = _lock_dir()
    if directory is None:
        yield
        return
    import fcntl

    try:
        fd = os.open(directory / f"{key[:32]}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:
                break
        yield
    finally:
        os.close(fd)  # the file stays: removing it would let two processes hold "the" lock


_shared: tuple[tuple, Cache] | None = None
_shared_mutex = threading.Lock()


def shared_cache() -> Cache:
    """The process's cache; made anew when the environment variables that describe it change."""
    global _shared
    described = (config.cache_dir(), tuple(config.read_only_layers()))
    with _shared_mutex:
        if _shared is None or _shared[0] != described:
            _shared = described, Cache.from_environment()
        return _shared[1]


def verify(layer: Layer) -> list[tuple[Path, str]]:
    """(file, what is wrong) for every entry that cannot be used."""
    wrong = []
    for path in layer.files():
        try:
            entry = Entry.from_bytes(path.read_bytes())
            expected = cache_key(entry.source, entry.options, Arch.parse(entry.arch), entry.compiler)
            if entry.key != expected or path.stem != expected:
                wrong.append((path, "its key is not the hash of its contents"))
        except (OSError, ValueError, TypeError, KeyError, SpecError) as e:
            wrong.append((path, str(e)))
    return wrong


def collect_garbage(layer: Layer, max_bytes: int) -> tuple[int, int]:
    """Removes damaged entries, then the least recently changed ones, until `max_bytes` remain: (files removed, bytes removed)."""
    removed = freed = 0
    sizes = []
    damaged = {path for path, _ in verify(layer)}
    for path in layer.files():
        with contextlib.suppress(OSError):
            info = path.stat()
            sizes.append((path not in damaged, info.st_mtime, info.st_size, path))
    total = sum(size for *_, size, _ in sizes)
    for sound, _, size, path in sorted(sizes):
        if sound and total <= max_bytes:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            removed, freed, total = removed + 1, freed + size, total - size
    return removed + layer.sweep(), freed
