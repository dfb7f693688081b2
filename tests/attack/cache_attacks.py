"""Parts that attacks on the cache share: children that may run as another user, kernels without a compiler, and campaigns.

A campaign is a number of trials with a count of errors. The tests run a few; by hand, any number:

    python tests/attack/cache_attacks.py kills 400
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ssmgen.cache.entry import Entry, cache_key
from ssmgen.cache.layer import Layer
from ssmgen.cache.store import Cache
from ssmgen.cache.upkeep import collect_garbage, verify
from ssmgen.compile import nvrtc
from ssmgen.compile.nvrtc import Compiled, Resources
from ssmgen.families.slot_copy.spec import SlotCopySpec
from ssmgen.spec.kernel import Arch

ARCH = Arch.parse("sm_90a")
BUILD = "CL-1 V12.9.86"
OPTIONS = ("--std=c++17",)
NOBODY = 65534


# Kernels whose cubin is a function of their source: a wrong one is seen at once.


def cubin_of(source: str) -> bytes:
    seed = hashlib.sha256(source.encode()).digest()
    return b"\x7fELF" + seed * 512


def entry(number: int) -> Entry:
    source = f"// kernel {number}\n" * 200
    key = cache_key(source, OPTIONS, ARCH, BUILD)
    spec = f"slot_copy:slot_bytes={number}"
    return Entry(key, spec, f"k{number}", str(ARCH), BUILD, OPTIONS, Resources(32, 0, 0, 0, 0), 0.1, source, cubin_of(source))


def spec(number: int = 1) -> SlotCopySpec:
    return SlotCopySpec(slot_bytes=512 * number, threads=32)


def use_fake_compiler(seconds: float = 0.0) -> None:
    """Puts a fake in the compiler's place for the rest of this process."""
    store = sys.modules[Cache.__module__]

    def compile_cubin(source: str, arch: Arch, spec: str) -> Compiled:
        time.sleep(seconds)
        return Compiled(cubin_of(source), Resources(32, 0, 0, 0, 0), seconds)

    store.render = lambda spec, arch: f"// {spec}\n" * 200
    nvrtc.compile_cubin, nvrtc.build_id = compile_cubin, lambda: BUILD
    nvrtc.options_for, nvrtc.library_path = lambda arch: OPTIONS, lambda: os.devnull


# Children.


class ChildError(AssertionError):
    """The error of a child."""


def forked(work: Callable[[], Any], uid: int | None = None, umask: int | None = None) -> tuple[int, int]:
    """(process, descriptor of its pipe). The child does nothing but `work`, whose result goes into the pipe."""
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        return pid, reading
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        if umask is not None:
            os.umask(umask)
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        try:
            told = pickle.dumps((True, work()))
        except BaseException:
            told = pickle.dumps((False, traceback.format_exc()))
        with open(writing, "wb") as pipe:
            pipe.write(told)
        status = 0
    finally:
        os._exit(status)


def result_of(child: tuple[int, int]) -> Any:
    """Raises ChildError with the child's traceback, or for a child that was killed."""
    pid, reading = child
    with open(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not told:
        raise ChildError(f"the child ended with status {status}: it hung, or was killed")
    sound, result = pickle.loads(told)
    if not sound:
        raise ChildError(result)
    return result


def in_child(work: Callable[[], Any], uid: int | None = None, umask: int | None = None) -> Any:
    return result_of(forked(work, uid, umask))


def got(directory: Path | None, number: int = 1, layers: tuple[Path, ...] = ()) -> Callable[[], tuple[bool, bool, list[str]]]:
    """Work of a child: (whether a kernel was there, whether it is right, warnings) of one call, without a compiler."""

    def work() -> tuple[bool, bool, list[str]]:
        use_fake_compiler()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            cache = Cache(directory, layers)
            found, hit = cache.get(spec(number), ARCH)
        return hit, found.cubin == cubin_of(found.source), [str(w.message) for w in told]

    return work


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that another user may enter, unlike pytest's own directories."""
    path = Path(tempfile.mkdtemp(prefix="ssmgen-attack-"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# Campaigns: each returns its counts and its errors; there must be none.


def wrong_entries(layer: Layer) -> list[str]:
    """The broken laws of a directory of fake kernels: no damage is left, and each cubin belongs to its source."""
    damaged = [f"{path}: {reason}" for path, reason in verify(layer)]
    return damaged + [f"{path}: the cubin of another source" for path, e in layer.entries() if e.cubin != cubin_of(e.source)]


def kills(trials: int, directory: Path, seed: int = 0) -> dict[str, int]:
    """Processes that do nothing but write entries are killed at random instants, each time in the same directory."""
    rng, layer, wrong = random.Random(seed), Layer(directory), []

    def write_for_ever() -> None:
        while True:
            layer.write(entry(rng.randrange(500)))

    for trial in range(trials):
        rng.seed(seed + trial)
        child = forked(write_for_ever)
        time.sleep(rng.uniform(0.0, 0.2))  # making one durable takes a disk some milliseconds
        os.kill(child[0], signal.SIGKILL)
        os.waitpid(child[0], 0)
        os.close(child[1])
        if trial % 20 == 19 or trial == trials - 1:
            wrong += wrong_entries(layer)
            if trial != trials - 1:
                collect_garbage(layer, 200 * 20_000)
    entries = len(list(layer.files()))
    leftovers = len(list(directory.rglob(".tmp-*")))
    layer.sweep(-1.0)
    wrong += map(str, directory.rglob(".tmp-*"))
    return {"kills": trials, "entries": entries, "leftovers": leftovers, "wrong": report(wrong)}


def damage(trials: int, directory: Path, seed: int = 0) -> dict[str, int]:
    """Entries with flipped, cut, spliced, zeroed and repeated bytes, and entries sealed again around an odd header."""
    rng, layer, wrong, misses = random.Random(seed), Layer(directory), [], 0
    whole = [entry(n) for n in range(8)]
    for trial in range(trials):
        of = rng.choice(whole)
        path = layer.path(of.key, of.arch)
        layer.write(of)
        path.write_bytes(_damaged(rng, of, rng.choice(whole)))
        try:
            found = layer.read(of.key, ARCH)
            listed = [p for p, _ in verify(layer)]
            list(layer.entries())
        except Exception:
            wrong.append(f"trial {trial}: {traceback.format_exc()}")
            continue
        misses += found is None
        if found is not None and (found.source, found.cubin, found.key) != (of.source, of.cubin, of.key):
            wrong.append(f"trial {trial}: another kernel was believed")
        if listed != ([path] if found is None else []):
            wrong.append(f"trial {trial}: verify says {listed}")
        if rng.random() < 0.1:
            collect_garbage(layer, 1e9)
            wrong += [f"trial {trial}: {path} stayed"] if verify(layer) else []
        layer.write(of)
        if layer.read(of.key, ARCH) != of:
            wrong.append(f"trial {trial}: it was not replaced")
    return {"damaged entries": trials, "misses": misses, "wrong": report(wrong)}


ODD = [
    None,
    True,
    -1,
    0,
    5,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x1b[2J",
    "\ud800",
    "9" * 400,
    [],
    [5],
    {},
    {"a": 1},
    [[[[]]]],
]


def _damaged(rng: random.Random, of: Entry, other: Entry) -> bytes:
    data, more = bytearray(of.to_bytes()), other.to_bytes()
    kind, at, length = rng.randrange(9), rng.randrange(len(data)), rng.randrange(1, 200)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at : at + length] = bytes(length)
    elif kind == 3:
        cut = rng.randrange(len(more))
        data[at:] = more[cut:]
    elif kind == 4:
        data[at:at] = data[at : at + length]
    elif kind == 5:
        data[at : at + length] = rng.randbytes(length)
    elif kind == 6:
        return resealed(of, header=rng.choice([b"5", b"[]", b"null", b'"x"', b"{}", b"[" * 5000, b'{"a":' * 5000, b"\xff", b"", b"NaN"]))
    elif kind == 7:
        values = header_of(of)
        values[rng.choice(sorted(values))] = rng.choice(ODD)
        return resealed(of, header=json.dumps(values).encode())
    else:
        values = header_of(of)
        values["resources"][rng.choice(sorted(values["resources"]))] = rng.choice(ODD)
        return resealed(of, header=json.dumps(values).encode())
    return bytes(data)


def header_of(of: Entry) -> dict[str, Any]:
    data = of.to_bytes()
    return json.loads(data[12 : 12 + int.from_bytes(data[8:12], "big")])


def resealed(of: Entry, header: bytes | None = None, source: bytes | None = None) -> bytes:
    """An entry with a right digest around another header or source."""
    text = of.source.encode() if source is None else source
    if header is None:
        header = json.dumps(header_of(of) | {"source_bytes": len(text)}).encode()
    body = b"SSMGEN1\n" + len(header).to_bytes(4, "big") + header + text + of.cubin
    return body + hashlib.sha256(body).digest()


def races(processes: int, directory: Path, seed: int = 0, keys: int = 6, at_once: int = 12) -> dict[str, int]:
    """Processes that want the same kernels at once, while some of them are killed, and others empty the cache or collect garbage."""
    rng, wrong, killed, warned = random.Random(seed), [], 0, 0

    def want(order: list[int], clears: bool) -> Callable[[], tuple[list[str], int]]:
        def work() -> tuple[list[str], int]:
            use_fake_compiler(0.002)
            bad = []
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for number in order:
                    cache = Cache(directory)
                    found, _ = cache.get(spec(number), ARCH)
                    if found.symbol != spec(number).name or found.cubin != cubin_of(found.source):
                        bad.append(f"wrong kernel for {number}")
                    if clears:
                        collect_garbage(Layer(directory), rng.choice([0, 30_000]))
            return bad, len(told)

        return work

    for start in range(0, processes, at_once):
        running = []
        for number in range(start, min(start + at_once, processes)):
            order = [rng.randrange(1, keys + 1) for _ in range(keys)]
            running.append((forked(want(order, clears=number % 6 == 5)), number % 4 == 3))
        for (pid, _), is_killed in running:
            if is_killed:
                time.sleep(rng.uniform(0, 0.02))
                os.kill(pid, signal.SIGKILL)
        for child, is_killed in running:
            try:
                bad, told = result_of(child)
                wrong, warned = wrong + bad, warned + told
            except ChildError as e:
                killed += is_killed
                wrong += [] if is_killed else [str(e)]
        wrong += wrong_entries(Layer(directory))
    return {"processes": processes, "killed": killed, "warnings": warned, "wrong": report(wrong)}


def forks(trials: int, directory: Path, seed: int = 0) -> dict[str, int]:
    """Forks children while two threads compile; each child compiles a kernel. It uses the compiler, because the locks inside it count."""
    rng, wrong, slowest = random.Random(seed), [], 0.0
    nvrtc.build_id()
    stop = threading.Event()

    def compile_on(first: int) -> None:
        cache = Cache(directory / "parent")
        for number in itertools.count(first):
            if stop.is_set():
                return
            cache.get(spec(number), ARCH)

    threads = [threading.Thread(target=compile_on, args=(10_000 * n + 1,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for trial in range(trials):
        time.sleep(rng.uniform(0, 0.1))
        start = time.monotonic()
        try:
            if in_child(lambda trial=trial: Cache(directory / str(trial)).get(spec(5), ARCH)[1]):
                wrong.append(f"trial {trial}: it was there already")
        except ChildError as e:
            wrong.append(f"trial {trial}: {e}")
        slowest = max(slowest, time.monotonic() - start)
    stop.set()
    for thread in threads:
        thread.join()
    return {"forks": trials, "slowest_seconds": round(slowest, 2), "wrong": report(wrong)}


def report(wrong: list[str]) -> int:
    for text in wrong[:20]:
        print(text, file=sys.stderr)
    return len(wrong)


CAMPAIGNS = {campaign.__name__: campaign for campaign in (kills, damage, races, forks)}

if __name__ == "__main__":
    name, count = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as place:
        print(name, json.dumps(CAMPAIGNS[name](count, Path(place) / "cache")))
