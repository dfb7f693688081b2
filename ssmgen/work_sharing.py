"""Work sharing: processes share a list of items, and one process does each item.

torchrun, Slurm or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT can start them. They communicate only through
torch.distributed's store. There are no collective operations, so no process waits for one that has died. The keys of the store are under
ssmgen/TURN/. A turn is one task; the next one begins after its result is stored:

    first/task       the task of all processes
    next             number of items handed out
    claim/N          owner of item N: "MEMBER#times", where `times` counts the processes that have had it
    done/N           result of item N, as JSON; the first one written counts
    beat/MEMBER      increases while a process lives; after a lease without change, by the observer's clock, the process counts as dead
    idle/MEMBER      set by a process that takes no more items
    member/RANK      the current process of a rank, "rank.nonce"; an earlier one is dead; name/RANK is its name for people
    holder/THING     the process that holds a thing which only one may have
    publisher        the process that writes the result: rank 0, or another one if rank 0 is dead
    result, bye/…    the exit code of all processes, and the ranks that have read it
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import ConfigError, SsmgenError

T = TypeVar("T")
LEASE = 20.0  # seconds of silence after which a process counts as dead
BEATS = 5  # signs of life per lease: an interpreter may miss one or two of them
LOOKS = 20  # reads of the store per lease by a waiting process; at least one every LOOK_SECONDS
LOOK_SECONDS = 0.25
ATTEMPTS = 3  # processes that may die with an item; then it is given up, so that it does not kill all of them
CONNECT_SECONDS = 60.0  # longest wait for the store to start
REQUEST_SECONDS = 60.0  # longest wait for an answer of the store
JOIN_SECONDS = 5.0  # longest wait at the end for a sign of life under way: the store may not answer any more
LEASE_HELP = "With several processes: seconds without a sign of life after which one counts as dead."


class CrewError(SsmgenError):
    """Processes that share work were started in a way that does not allow them to continue."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The position of a process among the processes that share work."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int
    hosted: bool = False  # store run by torchrun, which outlives rank 0; otherwise rank 0 runs the store's server


def seat() -> Seat | None:
    """This process's seat, from the variables that torchrun sets; None if it works alone. Raises ConfigError."""
    world = _number("WORLD_SIZE", 1, 1)
    if world == 1:
        return None
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        problem = f"is set without {', '.join(missing)}; expected all of them, as torchrun sets them"
        raise ConfigError("WORLD_SIZE", str(world), problem)
    rank = _number("RANK", 0, 0)
    if rank >= world:
        raise ConfigError("RANK", str(rank), f"is out of range; expected a rank below WORLD_SIZE {world}")
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Seat(
        rank, world, _number("LOCAL_RANK", 0, 0), _number("LOCAL_WORLD_SIZE", 1, 1), os.environ["MASTER_ADDR"],
        _number("MASTER_PORT", 0, 1), hosted,
    )  # fmt: skip


def _number(variable: str, default: int, least: int) -> int:
    text = os.environ.get(variable) or str(max(default, least))
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(variable, text, f"is not a whole number; expected {least} or more")
    return int(text)


class Crew:
    """One process's part in sharing work; a context manager, inside which the process counts as alive.

    task: describes the task, with equal text in all processes. Raises CrewError, here and in every method, if the store cannot be
    reached, or has another task.
    """

    def __init__(self, seat: Seat, task: str, lease: float = LEASE, name: str = ""):
        self.seat, self.task, self.lease = seat, task, lease
        self.name = name or f"process {os.getpid()} on {socket.gethostname()}"
        self.me = f"{seat.rank}.{secrets.token_hex(6)}"
        self._ending = threading.Event()
        self._seen: dict[str, tuple[bytes, float]] = {}  # last value read of a key that should change, and the time when that value was new

    def __enter__(self) -> Crew:
        with self._asking():
            store = self._connected(server=self.seat.rank == 0 and not self.seat.hosted)
        from torch.distributed import PrefixStore

        for self._turn in itertools.count():
            self._store = PrefixStore(f"ssmgen/{self._turn}", store)
            if (task := self.first("task", self.task)) == self.task:
                break
            if not self._ask("check", ["result"]):
                raise CrewError(
                    f"rank {self.seat.rank} was started with another task than the first rank:\n  {self.task}\nexpected:\n  {task}\nStart "
                    "all ranks with the same command."
                )
        self._ask("add", f"beat/{self.me}", 1)
        self._ask("set", f"name/{self.seat.rank}", self.name)
        self._ask("set", f"member/{self.seat.rank}", self.me)
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ending.set()
        with contextlib.suppress(CrewError):  # rank 0 may have ended, and the store with it
            for key in f"idle/{self.me}", f"bye/{self.seat.rank}":
                self._ask("set", key, "1")
        # A thread that returns from a request to the store while Python ends aborts the process: C++ cannot unwind that frame.
        self._beating.join(JOIN_SECONDS)

    def _connected(self, server: bool) -> Any:
        try:
            from torch.distributed import TCPStore
        except ImportError as e:
            raise CrewError(
                f"the store of torch.distributed, through which processes share work, cannot be imported: {e}. "
                "Start one process without WORLD_SIZE."
            ) from e
        wait = datetime.timedelta(seconds=CONNECT_SECONDS)
        store = TCPStore(self.seat.host, self.seat.port, None, server, wait, wait_for_workers=False)
        store.set_timeout(datetime.timedelta(seconds=REQUEST_SECONDS))
        return store

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Turns torch's errors about the store into CrewError."""
        try:
            yield
        except RuntimeError as e:
            whose = "torchrun, or the process that hosts it, has ended" if self.seat.hosted else "rank 0, which hosts it, has ended"
            raise CrewError(
                f"rank {self.seat.rank} cannot reach the store at {self.seat.host}:{self.seat.port}: {str(e).splitlines()[0]}\n"
                f"Perhaps {whose}. Finished work is kept: run the same command again to continue. "
                "Without WORLD_SIZE, one process works alone."
            ) from e

    def _ask(self, request: str, *words: Any) -> Any:
        with self._asking():
            return getattr(self._store, request)(*words)

    def _beat(self) -> None:
        """Sends signs of life over a separate connection: the other one may be waiting for an answer."""
        with contextlib.suppress(RuntimeError):  # the next request of the others reports the error
            store = self._connected(server=False)
            while not self._ending.wait(self.lease / BEATS):
                store.add(f"ssmgen/{self._turn}/beat/{self.me}", 1)

    def _read(self, key: str) -> str:
        """The value of a key; empty if it is not set."""
        return self._ask("get", key).decode() if self._ask("check", [key]) else ""

    def _still(self, key: str) -> bool:
        """Whether a key has not changed for a lease."""
        now, value = time.monotonic(), self._read(key).encode()
        if key not in self._seen or self._seen[key][0] != value:
            self._seen[key] = value, now
        return now - self._seen[key][1] > self.lease

    def _dead(self, member: str) -> bool:
        """Whether a newer process has its rank, as after a restart of all by torchrun, or it has been silent for a lease."""
        return self._read(f"member/{member.partition('.')[0]}") != member or self._still(f"beat/{member}")

    def _gone(self, rank: int) -> bool:
        """Whether a rank takes no more items: idle, dead, or not started within a lease."""
        if not (member := self._read(f"member/{rank}")):
            return self._still(f"member/{rank}")
        return bool(self._ask("check", [f"idle/{member}"])) or self._dead(member)

    def take(self, work: Callable[[], Iterable[T]], stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[int, T]]:
        """(number, item) for each item that this process is to do, until all are done or stop() is true. Call `done` for each.

        Items of dead processes come last. work: returns equal items in equal order in every process, and on every call. It also makes
        the items of other processes, which should cost little compared with doing them.
        """
        mine = self._next()
        left: Sequence[int] = ()
        for number, item in enumerate(work()):
            if stop():
                return
            left = range(number + 1)
            if number == mine:
                yield number, item
                mine = self._next()
        while not stop() and (left := [n for n in left if not self._ask("check", [f"done/{n}"])]):
            if found := {number for number in left if self._taken_over(number)}:
                yield from ((number, item) for number, item in enumerate(work()) if number in found)
            else:
                self._wait()

    def _next(self) -> int:
        """The number of an item without an owner; past the last one if there is none."""
        while True:
            number = int(self._ask("add", "next", 1)) - 1
            mine = f"{self.me}#1"
            if self._ask("compare_set", f"claim/{number}", "", mine) == mine.encode():
                return number

    def _taken_over(self, number: int) -> bool:
        """Whether this process has just taken over an item that is not done."""
        key = f"claim/{number}"
        held = self._read(key)
        owner, _, times = held.partition("#")
        if owner == self.me:
            return False  # another thread of this process has it
        if not (self._ask("check", [f"idle/{owner}"]) or self._dead(owner) if held else self._still(key)):
            return False
        mine = f"{self.me}#{int(times or 0) + 1}"
        if self._ask("compare_set", key, held, mine) != mine.encode() or self._ask("check", [f"done/{number}"]):
            return False
        if int(times or 0) >= ATTEMPTS:
            self.done(number, {"lost": f"{times} processes ended while they worked on it; no other process will try"})
            return False
        return True

    def first(self, key: str, value: str) -> str:
        """The value that the first process stored under a key; this process's value if it is the first."""
        return str(self._ask("compare_set", f"first/{key}", "", value).decode())

    def holder(self, what: str) -> int | None:
        """Claims a thing that one process may have. Returns the rank of another living process that has it; None if this process has it
        now."""
        key, beats = f"holder/{what}", dict[str, str]()
        while (held := self._read(key)) != self.me:
            if not held or self._ask("check", [f"idle/{held}"]) or self._dead(held):
                self._ask("compare_set", key, held, self.me)
                continue
            now = self._read(f"beat/{held}")
            if beats.setdefault(held, now) != now:
                return int(held.partition(".")[0])
            self._wait()
        return None

    def done(self, number: int, value: dict[str, Any]) -> None:
        """Stores the result of an item; value: JSON values."""
        times = self._read(f"claim/{number}").partition("#")[2]
        told = value | {"rank": self.seat.rank, "member": self.me, "taken_over": times not in ("", "1")}
        self._ask("compare_set", f"done/{number}", "", json.dumps(told))

    def finish(self, publish: Callable[[dict[int, dict[str, Any]]], int]) -> int:
        """Waits until no process takes more items, and has one process publish. Returns the exit code of `publish` in all processes.

        publish: gets the results of the finished items, by number, in order. If the publishing process dies, another one publishes again.
        """
        self._ask("set", f"idle/{self.me}", "1")
        others = [rank for rank in range(self.seat.world) if rank != self.seat.rank]
        while not self._ask("check", ["result"]):
            gone = [self._gone(rank) for rank in others]  # for all ranks: each one's silence counts from the first check
            if all(gone) and self._publishes():
                code = publish(self._results())
                self._ask("compare_set", "result", "", str(code))
            else:
                self._wait()
        code = int(self._ask("get", "result"))
        self._ask("set", f"bye/{self.seat.rank}", "1")
        if self.seat.rank == 0 and not self.seat.hosted:  # the store ends with this process
            while [rank for rank in others if not self._left(rank)]:
                self._wait()
        return code

    def _wait(self) -> None:
        time.sleep(min(self.lease / LOOKS, LOOK_SECONDS))

    def _publishes(self) -> bool:
        held = self._read("publisher")
        if held != self.me:
            first = self._read("member/0") if self.seat.rank else ""
            if (held and not self._dead(held)) or (not held and first and not self._dead(first)):
                return False
            self._ask("compare_set", "publisher", held, self.me)
        return self._read("publisher") == self.me

    def _left(self, rank: int) -> bool:
        member = self._read(f"member/{rank}")
        return bool(self._ask("check", [f"bye/{rank}"])) or (self._dead(member) if member else self._still(f"member/{rank}"))

    def _results(self) -> dict[int, dict[str, Any]]:
        said = ((number, self._read(f"done/{number}")) for number in range(int(self._ask("add", "next", 0))))
        return {number: json.loads(text) for number, text in said if text}

    def account(self, results: dict[int, dict[str, Any]], seconds: float, what: str) -> str:
        """A summary of each process's work, in lines. results: from `finish`, with `seconds` of each; seconds: since these processes
        began."""
        lines, before = [], 0
        for rank in range(self.seat.world):
            own = [r for r in results.values() if r["rank"] == rank]
            member = self._read(f"member/{rank}")
            before += sum(r["member"] != member for r in own)
            name = self._read(f"name/{rank}") or "which has not come"
            gone = member and rank != self.seat.rank and not self._ask("check", [f"idle/{member}"])
            over, busy = sum(r["taken_over"] for r in own), sum(r.get("seconds", 0.0) for r in own)
            lines.append(
                f"  rank {rank}, {name}{', no longer there' * bool(gone)}: {len(own)} {what}"
                + f", {over} taken over" * bool(over)
                + f", busy {busy:.1f} s"
            )
        lost, now = sum("lost" in r for r in results.values()), len(results) - before
        again = f", {before} of them before all were started again, the rest" * bool(before)
        rate = now / seconds if seconds else 0.0
        first = f"{len(results)} {what} by {self.seat.world} processes{again} in {seconds:.1f} s, {rate:.2f} a second"
        return "\n".join([first + f"; {lost} given up" * bool(lost), *lines])
