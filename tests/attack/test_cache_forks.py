"""A fork while other threads compile, and the locks of processes: a child inherits no lock, and waits for no thread of its parent."""

from __future__ import annotations

import os
import signal
import threading
import time

import cache_attacks as attacks
import pytest
from cache_attacks import ARCH, forked, in_child, result_of, spec, use_fake_compiler

from ssmgen.cache.process_lock import lock_dir, process_lock, sweep
from ssmgen.cache.store import Cache
from ssmgen.compile.forks import whole


def test_child_compiles_what_a_thread_of_its_parent_was_compiling(tmp_path):
    """The thread holds the lock on the kernel within the process, and that among processes."""

    def work() -> tuple[bool, float]:
        use_fake_compiler(1.0)
        cache = Cache(tmp_path)
        thread = threading.Thread(target=cache.get, args=(spec(), ARCH))
        thread.start()
        time.sleep(0.3)
        start = time.monotonic()

        def child() -> tuple[bool, float]:
            signal.alarm(20)
            found, _ = cache.get(spec(), ARCH)
            return found.cubin == attacks.cubin_of(found.source), time.monotonic() - start

        done = in_child(child)
        thread.join()
        return done

    right, seconds = in_child(work)
    assert right and seconds < 10


@pytest.mark.parametrize("killed", [False, True])
def test_child_that_lives_on_does_not_keep_the_lock(tmp_path, monkeypatch, killed):
    """Neither after its parent is done with it, nor after its parent is killed."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    told = tmp_path / "child"

    def parent() -> None:
        with process_lock("key"):
            if not (pid := os.fork()):
                time.sleep(8)
                os._exit(0)
            told.write_text(str(pid))
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)

    pid, pipe = forked(parent)
    os.close(pipe)
    os.waitpid(pid, 0)
    start = time.monotonic()
    with process_lock("key"):
        waited = time.monotonic() - start
    os.kill(int(told.read_text()), signal.SIGKILL)  # which raises if it is not there
    assert waited < 2


def test_fork_from_the_thread_that_compiles_does_not_wait_for_itself():
    """A signal's handler may fork at any instruction."""

    def work() -> float:
        start = time.monotonic()
        with whole(), whole():
            in_child(lambda: None)
        with whole():
            pass
        in_child(lambda: None)
        return time.monotonic() - start

    assert in_child(work) < 5


def test_threads_go_on_after_forks(tmp_path):
    """Many forks among many compilations: no thread waits for ever, in the parent or in a child."""

    def work() -> int:
        stop, turns = threading.Event(), [0] * 4

        def turn(n: int) -> None:
            while not stop.is_set():
                with whole():
                    turns[n] += 1
                    time.sleep(0.001)

        threads = [threading.Thread(target=turn, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        seen = []
        for _ in range(10):
            in_child(lambda: whole().__enter__())
            seen.append(min(turns))
            time.sleep(0.02)
        stop.set()
        for thread in threads:
            thread.join()
        return len(set(seen))

    assert in_child(work) > 3


# Files of locks.


def test_lock_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    in_child(attacks.got(tmp_path / "cache"))
    (directory,) = tmp_path.glob("ssmgen-locks-*")
    assert not list(directory.iterdir())


def test_lock_files_of_killed_holders_are_swept_and_held_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def hold(key: str) -> None:
        with process_lock(key):
            time.sleep(30)

    holders = [forked(lambda key=key: hold(key)) for key in ("a" * 64, "b" * 64)]
    (directory,) = _until(lambda: list(tmp_path.glob("ssmgen-locks-*")))
    _until(lambda: len(list(directory.iterdir())) == 2)
    os.kill(holders[0][0], signal.SIGKILL)
    os.waitpid(holders[0][0], 0)
    assert sweep() == 1 and [path.stem for path in directory.iterdir()] == ["b" * 32]
    os.kill(holders[1][0], signal.SIGKILL)
    os.waitpid(holders[1][0], 0)
    for _, pipe in holders:
        os.close(pipe)
    with process_lock("b" * 64):
        pass
    assert not list(directory.iterdir()), "the next holder removes it"


def _until(found, seconds: float = 10.0):
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def test_one_holder_at_a_time_although_files_are_removed(tmp_path, monkeypatch):
    """Holders append their begin and their end to one file; no other holder's line may come between the two."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    log = tmp_path / "log"

    def hold() -> None:
        for _ in range(20):
            with process_lock("key"), open(log, "a") as file:
                for word in ("begin", "end"):
                    print(word, os.getpid(), file=file, flush=True)
                    time.sleep(0.0005)

    for child in [forked(hold) for _ in range(6)]:
        result_of(child)
    lines = log.read_text().splitlines()
    assert len(lines) == 240
    assert all(b == "begin " + e.split()[1] and e.startswith("end") for b, e in zip(lines[::2], lines[1::2], strict=True))


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_lock_directory_that_others_can_write_to_is_not_used(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    theirs = lock_dir()
    assert theirs.parent == tmp_path
    theirs.chmod(mode)
    assert lock_dir() != theirs
    theirs.rmdir()
    theirs.symlink_to(tmp_path)
    assert lock_dir() != theirs
