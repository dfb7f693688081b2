"""A model of many cold starts: threads act as processes, sleeps as compilations and store requests. All other code is production code.

Each thread has a separate `SharedStore`, like a process; the store is a dict whose requests take time and are counted.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ssmgen.cache.entry import Entry
from ssmgen.cache.remote import ALL, SharedStore, index_path
from ssmgen.cache.signing import Index, Signer
from ssmgen.settings import Remote

from .kernels import ARCH, made
from .processes import Started
from .stand_in import kind


@dataclass
class Modelled:
    """A store whose every request takes `delay` seconds, half as much more or less, and is counted."""

    delay: float
    url: str = "modelled://store"
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def get(self, path: str, limit: int) -> bytes:
        self._count("GET", path)
        try:
            return self.objects[path][:limit]
        except KeyError:
            raise FileNotFoundError(path) from None

    def put(self, path: str, data: bytes, new: bool = False) -> None:
        self._count("PUT", path)
        with self.mutex:
            if new and path in self.objects:
                raise FileExistsError(path)
            self.objects[path] = data

    def names(self, path: str) -> list[str]:
        self._count("GET", f"{path}?list-type")
        with self.mutex:
            below = [name[len(path) + 1 :] for name in self.objects if name.startswith(f"{path}/")]
        return sorted({name.partition("/")[0] for name in below})

    def remove(self, path: str) -> None:
        self._count("DELETE", path)
        with self.mutex:
            self.objects.pop(path, None)

    def _count(self, method: str, path: str) -> None:
        time.sleep(self.delay * random.uniform(0.5, 1.5))
        with self.mutex:
            self.requests[kind(method, f"/{path}")] += 1


def simulate(starts: int, kernels: int, compile_seconds: float, delay: float, folder: Path, store: str) -> tuple[list[Started], Modelled]:
    """Cold starts at once, with a store that is `full` (pushed before), `empty` (and written back to), or `none`."""
    file = folder / "key.pem"
    signer = Signer.load(file) if file.exists() else Signer.make(file)
    remote = Remote("modelled://store", (signer.public,), signing_key=file if store == "empty" else None, writes=store == "empty")
    modelled, entries = Modelled(delay), [made(number) for number in range(kernels)]
    if store == "full":
        sender = SharedStore(remote, Modelled(0.0, objects=modelled.objects))
        listed = {entry.key: sender.send(entry) for entry in entries}
        path = index_path(signer.public, ARCH, ALL)
        modelled.objects[path] = Index(str(ARCH), listed).to_bytes(signer)
    together = threading.Barrier(starts)

    def one(_: int) -> Started:
        shared = SharedStore(remote, modelled)
        together.wait()
        begin, compiled = time.perf_counter(), 0
        for entry in entries:
            if store == "none":
                time.sleep(compile_seconds)
                compiled += 1
            else:
                compiled += _got(shared, entry, compile_seconds)
        return Started(compiled, kernels - compiled, sorted(shared._warned), time.perf_counter() - begin)

    with ThreadPoolExecutor(starts) as pool:
        return list(pool.map(one, range(starts))), modelled


def _got(shared: SharedStore, wanted: Entry, compile_seconds: float) -> bool:
    """Whether it was compiled: the steps of `Cache.get` after its directories."""
    if shared.fetch(wanted.key, wanted.symbol, ARCH):
        return False
    with shared.turn(wanted.key, wanted.symbol, ARCH) as sent:
        if sent:
            return False
        time.sleep(compile_seconds)
        shared.publish(wanted)
        return True
