"""Work shared by processes: the split of items, the share of a dead process, and the single result, which equals one process's."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import crew_cases
import pytest
from click.testing import CliRunner

from ssmgen import work_sharing as crew
from ssmgen.cache.layer import Layer
from ssmgen.cache.store import Cache
from ssmgen.cli import main
from ssmgen.errors import ConfigError
from ssmgen.select import registry
from ssmgen.select import tuned as table
from ssmgen.spec.kernel import SM90
from ssmgen.tune.sharing import take_card
from ssmgen.variants.build import NotKeptError, build_share, built_by_all
from ssmgen.work_sharing import Crew, CrewError, Seat, seat

SCRIPT = str(Path(crew_cases.__file__))
LEASE = 0.6


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def crew_of(world: int, lease: float = LEASE):
    """Members of a crew in this process; the first of them hosts the store."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Crew(Seat(n, world, n, world, "127.0.0.1", port), "a task", lease)) for n in range(world)]


def silence(member: Crew) -> None:
    """Ends a member like SIGKILL: no more signs of life, and no message."""
    member._ending.set()


def together(*members, count=20):
    """(items by member, results, exit codes) when each member shares its work in a separate thread."""
    did: dict[int, list[int]] = {m.seat.rank: [] for m in members}
    published, codes = [], {}

    def publish(told):
        published.append(told)
        return 7

    def share(member):
        for number, item in member.take(lambda: range(100, 100 + count)):
            assert item == 100 + number
            did[member.seat.rank].append(number)
            time.sleep(0.01)
            member.done(number, {"seconds": 0.01})
        codes[member.seat.rank] = member.finish(publish)

    threads = [threading.Thread(target=share, args=(m,)) for m in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(published) == 1, "one result"
    return did, published[0], codes


def test_each_item_is_done_by_one():
    with crew_of(3) as members:
        did, told, codes = together(*members)
        assert sorted(n for own in did.values() for n in own) == list(range(20)) and all(len(own) > 2 for own in did.values())
        assert list(told) == list(range(20)) and {n: said["rank"] for n, said in told.items()} == {n: r for r in did for n in did[r]}
        assert codes == {0: 7, 1: 7, 2: 7} and not any(said["taken_over"] for said in told.values())
        text = members[0].account(told, 2.0, "things")
        assert (
            text.startswith("20 things by 3 processes in 2.0 s, 10.00 a second\n") and text.count("busy") == 3 and "no longer" not in text
        )


def test_the_share_of_the_dead_is_taken_over_after_a_lease():
    with crew_of(3) as members:
        lost = [next(members[2].take(lambda: range(20)))[0] for _ in range(2)]
        handed = members[2]._ask("add", "next", 1) - 1  # handed out, and not claimed
        silence(members[2])
        start = time.monotonic()
        did, told, _ = together(*members[:2])
        assert LEASE < time.monotonic() - start < 10 * LEASE
        assert sorted(did[0] + did[1]) == list(range(20)) == list(told)
        assert {n for n, said in told.items() if said["taken_over"]} >= set(lost) and handed in told
        assert "rank 2" in (text := members[0].account(told, 1.0, "things")) and "no longer there: 0 things" in text


def test_who_lives_keeps_its_share_however_long_it_takes():
    with crew_of(2) as members:
        slow = members[1].take(lambda: range(4))
        number, _ = next(slow)

        def finish():
            time.sleep(3 * LEASE)
            members[1].done(number, {"slow": True})
            list(slow)
            members[1].finish(lambda told: 0)

        thread = threading.Thread(target=finish)
        thread.start()
        did, told, _ = together(members[0], count=4)
        thread.join()
        assert number not in did[0] and told[number]["slow"]


def test_an_item_that_ends_processes_is_given_up():
    with crew_of(crew.ATTEMPTS + 1, lease=0.3) as members:
        for member in members[1:]:
            items = member.take(lambda: range(1))
            assert next(items)[0] == 0
            silence(member)
        assert list(members[0].take(lambda: range(1))) == []
        told = {}
        members[0].finish(lambda said: told.update(said) or 0)
        assert f"{crew.ATTEMPTS} processes ended" in told[0]["lost"]
        members[0].seat = Seat(0, 6, 0, 6, "127.0.0.1", 1)
        text = members[0].account(told, 1.0, "things")
        assert "1 given up" in text and "rank 5, which has not come: 0 things" in text


def test_another_publishes_for_the_dead_one():
    with crew_of(2) as members:
        members[0]._ask("set", "publisher", members[0].me)  # that has begun to
        silence(members[0])
        did, told, codes = together(members[1], count=3)
        assert did[1] == [0, 1, 2] == list(told) and codes == {1: 7}


def test_after_a_new_start_nobody_waits_for_the_old_processes():
    """A restart like torchrun's: all members have ended before all are started again, and the store is the same."""
    with crew_of(2, lease=60) as old:
        number, _ = next(old[1].take(lambda: range(5)))
        host = old[0].seat
        seats = [Seat(n, 2, n, 2, host.host, host.port, hosted=True) for n in range(2)]
        with Crew(seats[0], "a task", 60) as a, Crew(seats[1], "a task", 60) as b:
            start = time.monotonic()
            did, told, _ = together(a, b, count=5)
            assert time.monotonic() - start < 20 and number in did[0] + did[1] and list(told) == list(range(5))
            assert "5 things by 2 processes in 1.0 s, 5.00 a second" in a.account(told, 1.0, "things")
            told[0]["member"] = old[told[0]["rank"]].me
            assert "5 things by 2 processes, 1 of them before all were started again, the rest in 1.0 s, 4.00 a s" in a.account(
                told, 1.0, "things"
            )


def test_budgets_end_it_with_items_left():
    with crew_of(2) as members:
        seen = []
        for number, _ in members[0].take(lambda: range(9), lambda: len(seen) == 2):
            seen.append(number)
            members[0].done(number, {})
        assert list(members[1].take(lambda: range(9), lambda: True)) == []
        members[1]._ask("set", f"idle/{members[1].me}", "1")
        told = {}
        members[0].seat = Seat(0, 2, 0, 2, "127.0.0.1", members[0].seat.port, hosted=True)  # no member waits for a farewell
        assert members[0].finish(lambda said: told.update(said) or 0) == 0 and list(told) == seen


def test_processes_with_other_work_are_refused():
    with crew_of(1) as (first,), pytest.raises(CrewError, match=r"(?s)rank 1 was started with another task.*another.*expected.*a task"):
        Crew(Seat(1, 2, 1, 2, "127.0.0.1", first.seat.port), "another", LEASE).__enter__()


def test_what_one_may_have_is_had_by_one_that_lives():
    with crew_of(2) as members:
        assert [members[n].holder("a card") for n in (1, 0, 1)] == [None, 1, None] and members[0].holder("another") is None
        silence(members[1])
        assert members[0].holder("a card") is None


def test_a_share_of_a_build_ends_where_it_fails(tmp_path):
    """It fails in one of its threads, or because the cache cannot be written. The others take the rest."""
    spec = registry.select(crew_cases.OP, crew_cases.PROBLEM, 1, SM90, True)
    work = [(replace(spec, tile=spec.tile << n), SM90) for n in range(3)]

    def broken(*words):
        raise MemoryError

    def cache() -> Cache:
        found = Cache(tmp_path / "none")
        found.writable = None  # as without a home directory
        return found

    with crew_of(1) as (first,), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "get", broken)
        with pytest.raises(MemoryError):
            build_share(first, work, cache(), 2, 0)
    with crew_of(1) as (first,):
        build_share(first, work, cache(), 1, 0)
        told = {}
        first.finish(lambda said: told.update(said) or 0)
        built, *_ = built_by_all(told, work, cache=cache(), jobs=1, keep=True)
        assert list(told) == [0] and isinstance(built.error, NotKeptError)


def test_one_task_after_the_other_in_one_store():
    """A job's processes build, and then tune."""
    with crew_of(1) as (first,):
        again = Seat(0, 1, 0, 1, "127.0.0.1", first.seat.port, hosted=True)
        assert first.finish(lambda told: 3) == 3
        with Crew(again, "a second task", LEASE) as second:
            for number, _ in second.take(lambda: range(2)):
                second.done(number, {})
            assert second.finish(lambda told: len(told)) == 2
        with Crew(again, "a task", LEASE) as known:
            assert known.finish(lambda told: 5) == 3, "as it ended"


def test_no_sign_of_life_is_under_way_after_the_end():
    """A thread that is in the store's C++ code while Python ends would abort the process."""
    asked, answered = threading.Event(), []

    class Slow(Crew):
        def _beat(self):
            asked.set()
            time.sleep(0.3)
            super()._beat()
            answered.append(True)

    with Slow(Seat(0, 1, 0, 1, "127.0.0.1", free_port()), "a task", LEASE) as member:
        assert asked.wait(30)
    assert answered and not member._beating.is_alive()


def test_who_is_left_without_the_store_says_so():
    with crew_of(1) as (first,):
        one = Crew(Seat(1, 2, 1, 2, "127.0.0.1", first.seat.port), "a task", LEASE).__enter__()
        del first._store
        first._ending.set()
        time.sleep(LEASE)
        with pytest.raises(CrewError, match=r"(?s)rank 1 cannot reach the store at .*rank 0, which hosts it, has ended.* same command"):
            list(one.take(lambda: range(3)))
        first._store = one._store


def test_seats_are_what_torchrun_says(monkeypatch):
    for name in (
        "WORLD_SIZE",
        "RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_RANK",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RESTART_COUNT",
    ):
        monkeypatch.delenv(name, raising=False)
    assert seat() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="is set without RANK, MASTER_ADDR, MASTER_PORT"):
        seat()
    for name, value in {
        "RANK": "3",
        "MASTER_ADDR": "there",
        "MASTER_PORT": "29500",
        "LOCAL_RANK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert seat() == Seat(3, 4, 1, 1, "there", 29500)
    for name, value in {"RANK": "4", "MASTER_PORT": "x", "WORLD_SIZE": "-1"}.items():
        with monkeypatch.context() as context, pytest.raises(ConfigError, match=name):
            context.setenv(name, value)
            seat()


def test_more_processes_than_cards_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(CrewError, match="on a machine with 2 cards; expected one process per card"):
        take_card(Seat(2, 3, 2, 3, "here", 1))


# Real processes.


def run(*command, folder: Path, **more: str) -> subprocess.Popen[str]:
    env = crew_cases.environment(folder, **more)
    return subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def torchrun(*command, folder: Path, processes: int, restarts: int = 0, **more: str) -> subprocess.Popen[str]:
    options = [
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
    ]
    return run("-m", "torch.distributed.run", *options, *command, folder=folder, **more)


def ranks(*command, folder: Path, processes: int, **more: str) -> list[subprocess.Popen[str]]:
    """One process per node, as other launchers start them."""
    where = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | more
    return [run(*command, folder=folder, **where, RANK=str(n)) for n in range(processes)]


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def tuned_here(path: Path) -> str:
    """The output of this single process when it tunes the same; its table is written to a path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSMGEN_CACHE_DIR", str(path.parent))
        crew_cases.stand_in(patch.setattr)
        result = CliRunner().invoke(main, ["tune", crew_cases.OP, "--out", str(path)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> str:
    """The table that one process writes."""
    path = tmp_path_factory.mktemp("alone") / "table.json"
    assert f"{len(crew_cases.SIZES)} cases in" in tuned_here(path)
    return path.read_text()


def tuning(path: Path) -> list[str]:
    return [SCRIPT, "tune", crew_cases.OP, "--out", str(path), "--lease", "2"]


@pytest.mark.matrix
@pytest.mark.processes
def test_torchrun_tunes_one_table_though_a_process_is_killed(alone, tmp_path):
    path = tmp_path / "table.json"
    code, out, err = ended(torchrun(*tuning(path), folder=tmp_path, processes=2, restarts=1, CREW_KILL="1:1"))
    assert code == 0 and path.read_text() == alone, err
    assert out.count(f"{len(crew_cases.SIZES)} cases in") == 1 and err.count("cases by 2 processes in") == 1


@pytest.mark.matrix
def test_ranks_tune_one_table_though_one_is_killed(alone, tmp_path):
    path = tmp_path / "table.json"
    first, second = [ended(p) for p in ranks(*tuning(path), folder=tmp_path, processes=2, CREW_KILL="1:1")]
    assert (first[0], second[0]) == (0, -9), first[2]
    assert path.read_text() == alone and "1 taken over" in first[2] and "no longer there: 0 cases" in first[2]
    assert f"{len(crew_cases.SIZES)} cases in" in first[1]


@pytest.mark.matrix
def test_without_rank_0_what_is_there_is_kept_and_the_same_command_goes_on(alone, tmp_path):
    path = tmp_path / "table.json"
    first, second = [ended(p) for p in ranks(*tuning(path), folder=tmp_path, processes=2, CREW_KILL="0:2")]
    assert first[0] == -9 and second[0] == 1 and "CrewError: rank 1 cannot reach the store" in second[2], second[2]
    assert 1 <= len(table.read(path)) < len(crew_cases.SIZES)
    assert "(known)" in tuned_here(path) and path.read_text() == alone


def built(folder: Path) -> dict[str, tuple[bytes, str]]:
    return {entry.symbol: (entry.cubin, entry.source) for _, entry in Layer(folder).entries()}


@pytest.mark.matrix
def test_ranks_build_one_layer_though_one_is_killed(tmp_path):
    words = [SCRIPT, "build", "--model", "mamba-130m", "--op", crew_cases.OP, "--no-pdl", "--json"]
    result = CliRunner().invoke(main, [*words[1:], "--out", str(tmp_path / "alone")])
    assert result.exit_code == 0, result.output
    variants = json.loads(result.stdout)["variants"]
    shared = [*words, "--out", str(tmp_path / "layer"), "--lease", "2", "--jobs", "1"]
    first, second = [ended(p) for p in ranks(*shared, folder=tmp_path, processes=2, CREW_KILL="1:1")]
    assert (first[0], second[0]) == (0, -9), first[2]
    assert built(tmp_path / "layer") == built(tmp_path / "alone") != {} and f"{len(variants)} variants by 2 processes" in first[2]
    told = json.loads(first[1])["variants"]
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in told] == [
        {k: v for k, v in row.items() if k != "seconds"} for row in variants
    ]
