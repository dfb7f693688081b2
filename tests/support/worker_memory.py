"""The bound on memory: a run fails, naming the test, once a process that runs its tests, a worker, has held more than `worker_memory_mib`.

Processes that a worker starts, such as a compiler or another Python, are each bounded separately. Nothing is bounded if torch sees a CUDA
device,
whose libraries and context take more, nor without Linux's /proc.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STATUS = Path("/proc/self/status")
SLACK = 64  # MiB that tests may hold at their end before collection, code that they run again included
MADV_DONTNEED = 4
M_MMAP_THRESHOLD, OWN_PAGES = -3, 1 << 20  # blocks of at least this many bytes get their own pages
PEAKS = pytest.StashKey[dict[str, int]]()
COLLECTED, LEFT = pytest.StashKey[int](), pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("worker_memory_mib", "MiB that a process which runs tests may hold; 0: any", default="0")


def pytest_configure() -> None:
    """Large blocks go back to the system when they are freed. Left alone, glibc takes the largest block that was freed, up to 32 MiB, for
    the least that gets its own pages. Smaller blocks then leave holes among live data: some 100 MiB after these tests."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, OWN_PAGES)


def held(field: str) -> int:
    """MiB that this process holds (VmRSS), without files (RssAnon), or has held at most (VmHWM)."""
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(field)) // 1024


def peaks() -> dict[str, int]:
    """Most MiB that this worker has held, and the largest of the ended processes that it has started, if that is more."""
    # A process starts with its parent's peak in ru_maxrss. That value therefore does not measure the worker, and below the
    # worker's own peak it does not measure its children.
    worker, started = held("VmHWM"), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    return {"a worker": worker} | ({"a process that it started": started} if started > worker else {})


@functools.cache
def bounded() -> bool:
    torch = sys.modules.get("torch")
    return STATUS.exists() and not (torch and torch.cuda.is_available())


def pytest_collection_finish() -> None:
    """The tests themselves live as long as the run: collections of garbage need not look at their million objects again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fails the first test after which a peak is above the bound. Later tests only inherit the peak."""
    try:
        return (yield)
    finally:
        if bounded():
            bound = int(item.config.getini("worker_memory_mib"))
            collect(item.config, bound)
            check(item, bound)


def collect(config: pytest.Config, bound: int) -> None:
    """Collects what tests leave in frames of errors, in compiled code and in the allocator of C, when it is much: Python counts
    objects, not their tensors. Code counts only near the bound: pages that are given back too early are read again by the next test."""
    libc = ctypes.CDLL(None)
    if held("RssAnon") > config.stash.get(COLLECTED, 0) + SLACK:
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()
        if emulator := sys.modules.get("ssmgen.emulator"):
            emulator.compile_source.cache_clear()
        gc.collect()
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        config.stash[COLLECTED] = held("RssAnon")
    if held("VmRSS") > max(bound * 5 // 8, config.stash.get(LEFT, 0) + SLACK):
        leave_code(libc)
        config.stash[LEFT] = held("VmRSS")


def leave_code(libc: ctypes.CDLL) -> None:
    """Pages of libraries' code that were run once, 150 MiB of torch, NVRTC and others: the system's, which has them for all processes, and
    gives them back when they are run again. Not what may have been written, such as the tables of a library that is loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, inode, *_ = line.split(maxsplit=5)
        if mode == "r-xp" and inode != "0":
            first, end = (int(address, 16) for address in span.split("-"))
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_DONTNEED)


def check(item: pytest.Item, bound: int) -> None:
    before, now = item.config.stash.get(PEAKS, {}), peaks()
    item.config.stash[PEAKS] = now
    if passed := [f"{who} has held {mib} MiB" for who, mib in now.items() if mib > bound >= before.get(who, 0) and bound]:
        pytest.fail(
            f"{' and '.join(passed)} since {item.nodeid}, more than the {bound} of worker_memory_mib: this test, or those before it in the "
            "same process, take or keep too much. Use smaller shapes; keep nothing in module variables and caches.",
            pytrace=False,
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peaks"] = session.config.stash.get(PEAKS, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    theirs = getattr(node, "workeroutput", {}).get("peaks", {})
    mine = node.config.stash.setdefault(PEAKS, {})
    mine |= {who: max(mib, mine.get(who, 0)) for who, mib in theirs.items()}


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if held := config.stash.get(PEAKS, {}):
        terminalreporter.write_line("Most memory held: " + ", ".join(f"{who} {mib} MiB" for who, mib in held.items()))
