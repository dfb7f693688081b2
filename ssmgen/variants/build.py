"""Compiles lists of specs to cubins, in parallel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from typing import Any

from ..cache.entry import Entry
from ..cache.store import Cache
from ..errors import SpillError, SsmgenError
from ..spec.kernel import Arch, KernelSpec
from ..work_sharing import Crew, CrewError

PATIENCE = 0.25  # seconds that running compilations get after Ctrl-C: most take 0.2


class NotKeptError(SsmgenError):
    """A variant was compiled, and is not in any directory of the cache."""

    def __init__(self, name: str, arch: str, reason: str):
        super().__init__(f"{name} for {arch} was compiled and could not be kept: {reason}")


@dataclass(frozen=True, slots=True)
class Built:
    """One variant's outcome: an entry or an error."""

    spec: KernelSpec
    arch: Arch
    entry: Entry | None
    hit: bool
    error: SsmgenError | None


def build(
    work: Sequence[tuple[KernelSpec, Arch]],
    cache: Cache,
    jobs: int | None = None,
    max_spill: int = 0,
    done: Callable[[Built], None] = lambda built: None,
    keep: bool = False,
) -> list[Built]:
    """Compiles missing variants; `done` gets each outcome as it comes. A variant that spills more than max_spill bytes is an error.

    keep: a variant that is in no cache directory after its compilation is an error too; then no further ones begin, and there are
    fewer outcomes than `work` has items. A KeyboardInterrupt also stops new compilations. It is raised to the caller once the running ones
    have ended, or after PATIENCE; compilations still running then have no outcome and are not joined.

    Threads suffice: NVRTC releases the GIL.
    """

    def one(spec: KernelSpec, arch: Arch) -> Built:
        try:
            entry, hit = cache.get(spec, arch)
        except SsmgenError as e:
            return Built(spec, arch, None, False, e)
        r = entry.resources
        error: SsmgenError | None = SpillError(str(spec), str(arch), r.spills, r.registers) if r.spills > max_spill else None
        if keep and (reason := _not_kept(entry, arch, cache)):
            error = NotKeptError(spec.name, str(arch), reason)
        return Built(spec, arch, entry, hit, error)

    results = []

    def ended(future: Future[Built]) -> None:
        results.append(future.result())
        done(results[-1])

    order = {pair: i for i, pair in enumerate(dict.fromkeys(work))}
    pool = ThreadPoolExecutor(jobs or os.cpu_count())
    left: set[Future[Built]] = set()
    try:
        left |= {pool.submit(one, spec, arch) for spec, arch in order}
        for future in as_completed(tuple(left)):
            left.discard(future)
            if not future.cancelled():
                ended(future)
                if isinstance(results[-1].error, NotKeptError):
                    _cancel(left)
    except KeyboardInterrupt:
        _cancel(left)
        for future in wait(left, PATIENCE).done:
            if not future.cancelled():
                ended(future)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return sorted(results, key=lambda b: order[b.spec, b.arch])


def build_share(crew: Crew, work: Sequence[tuple[KernelSpec, Arch]], cache: Cache, jobs: int, max_spill: int) -> None:
    """Compiles this process's share of the missing variants into the cache, and tells the other processes how long each one took.

    After a variant that cannot be kept, no further ones begin. A KeyboardInterrupt is raised to the caller without waiting for running
    compilations.
    """
    taking, ended = threading.Lock(), threading.Event()
    items = crew.take(lambda: work, ended.is_set)

    def some() -> None:
        try:
            while not ended.is_set():
                with taking:
                    number, pair = next(items, (0, None))
                if pair is None:
                    return
                start = time.perf_counter()
                (built,) = build([pair], cache, 1, max_spill, keep=True)
                crew.done(number, {"seconds": time.perf_counter() - start, "hit": built.hit})
                if isinstance(built.error, NotKeptError):
                    ended.set()
        except BaseException:
            ended.set()  # or the other threads would wait for this thread's item
            raise

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in [pool.submit(some) for _ in range(jobs)]:
            future.result()
    finally:
        ended.set()
        pool.shutdown(wait=False, cancel_futures=True)


def built_by_all(told: Mapping[int, Mapping[str, Any]], work: Sequence[tuple[KernelSpec, Arch]], **how: Any) -> list[Built]:
    """The outcomes of `build` for all of the work, after processes have done their shares. It finds compiled variants and compiles missing
    ones, except variants that processes have died of. told: results of the processes, by number. how: arguments of `build`."""
    pairs = list(work)
    lost = {pairs[n]: CrewError(f"{pairs[n][0].name} for {pairs[n][1]}: {said['lost']}") for n, said in told.items() if "lost" in said}
    missed = {pairs[n] for n, said in told.items() if said.get("hit") is False}
    found = {(b.spec, b.arch): b for b in build([pair for pair in pairs if pair not in lost], **how)}
    found |= {pair: Built(*pair, None, False, error) for pair, error in lost.items()}
    return [replace(found[pair], hit=found[pair].hit and pair not in missed) for pair in pairs if pair in found]


def _cancel(futures: Iterable[Future[Built]]) -> None:
    """Cancels the compilations that have not begun."""
    for future in futures:
        future.cancel()


def _not_kept(entry: Entry, arch: Arch, cache: Cache) -> str:
    """Why an entry is in no directory of the cache; empty if it is in one."""
    if any(layer.read(entry.key, arch) for layer in cache.layers):
        return ""
    if cache.writable is None:
        return "the cache has no writable directory"
    path = cache.writable.path(entry.key, arch)
    try:
        cache.writable.write(entry)  # retry: the write raises an error if an obstacle is still there
    except OSError as e:
        return str(e) if str(path) in str(e) else f"{path}: {e.strerror or e}"
    return "" if cache.writable.read(entry.key, arch) else f"{path} was written and cannot be read back"
