"""The bound on memory: a run fails and names the test as soon as a worker, a process that runs tests, has held `worker_memory_mib`.

Each process that a worker starts, such as a compiler, has its own bound. There is no bound without Linux's /proc, or if torch sees a CUDA
device: its libraries and context take more. A CUDA build of torch has LIBRARIES more.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
import sys
import weakref
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

STATUS = Path("/proc/self/status")
SLACK = 32  # MiB that tests may add before memory is collected, and that code may add before it is released
LIBRARIES = 256  # MiB of files: after one test, 626 MiB with a CUDA build of torch 2.14 and 348 with a CPU build of 2.13
MADV_DONTNEED = 4
SELDOM = 10_000, 10, 100  # Python's own thresholds are 700, 10, 10
M_MMAP_THRESHOLD, OWN_PAGES = -3, 1 << 20  # blocks of at least this many bytes get their own pages
PEAKS = pytest.StashKey[dict[str, int]]()
COLLECTED, LEFT = pytest.StashKey[int](), pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("worker_memory_mib", "MiB that a process which runs tests may hold; 0: any", default="0")


def pytest_configure() -> None:
    """Returns large blocks to the system when they are freed.

    By default, glibc gives own pages only to blocks as large as the largest freed one, up to 32 MiB. Smaller blocks then leave holes among
    live data: some 100 MiB after these tests."""
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests live as long as the run. No collection of garbage looks at their 700000 objects: 6 s while they are made, 0.1 to 1 s each time
    later. `collect` bounds memory, so Python's own collections can be rare."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fails the first test after which a peak is above the bound. Later tests only inherit the peak."""
    try:
        return (yield)
    finally:
        if bounded():
            collect(item.config)
            check(item, bound_of(item.config))


def bound_of(config: pytest.Config) -> int:
    """MiB; 0 for none."""
    bound = int(config.getini("worker_memory_mib"))
    torch = sys.modules.get("torch")
    return bound + LIBRARIES if bound and torch and torch.version.cuda else bound


def collect(config: pytest.Config) -> None:
    """Collects memory that tests leave in frames of errors, in compiled code and in C's allocator, and releases code, if either is much.

    This bounds what a worker holds when a test begins. Python's own collector counts objects, not their tensors."""
    libc = ctypes.CDLL(None)
    if held("RssAnon") > config.stash.get(COLLECTED, 0) + SLACK:
        forget_graphs()
        if emulator := sys.modules.get("ssmgen.emulator"):
            emulator.compile_source.cache_clear()
        if store := sys.modules.get("ssmgen.cache.store"):
            store._shared = None  # the process's cache, which keeps all kernels that NVRTC has compiled
        gc.collect()
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)
        config.stash[COLLECTED] = held("RssAnon")
    if held("RssFile") > config.stash.get(LEFT, 0) + SLACK:
        leave_code(libc)
        config.stash[LEFT] = held("RssFile")


def forget_graphs() -> None:
    """Forgets what torch has compiled: 7 MiB for a decode step of a model.

    Each object that a graph depends on has a finalizer, which holds the graph's guards. Classes and functions live as long as the process,
    so these guards outlive torch's own reset."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
        for finalizer in [*weakref.finalize._registry]:
            _, called, *_ = finalizer.peek() or (None, None)
            if isinstance(called, functools.partial) and called.func.__module__ == "torch._dynamo.guards":
                finalizer.detach()


def leave_code(libc: ctypes.CDLL) -> None:
    """Releases pages of library code that ran once: 150 MiB of torch, NVRTC and others. Takes 2 to 4 ms.

    The system holds them for all processes and maps them again when the code runs. Pages that may have been written, such as a library's
    tables, stay."""
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
