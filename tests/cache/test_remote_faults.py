"""A store that machines share never stops a process; and of processes that start at once, few compile."""

from __future__ import annotations

import sys
import threading
import time
import warnings

import pytest
from remote_cases import MARKS, ONE, fresh, got, no_warning, one_warning, pushed
from selection import costly

from ssmgen.cache import exchange, remote
from ssmgen.cache.layer import Layer
from ssmgen.cache.remote import SharedStore
from ssmgen.cache.store import Cache
from ssmgen.errors import RemoteError
from tools.fleet.kernels import ARCH, made, spec
from tools.fleet.processes import remote_of, start_all, summary
from tools.fleet.simulation import simulate
from tools.fleet.stand_in import Fault

pytest_plugins = ["remote_cases"]
pytestmark = MARKS


@costly(1)
@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (Fault(delay=5.0), "did not read within 0.5 s"),
        (Fault(status=500), "did not read"),
        (Fault(status=503, code="SlowDown"), "did not read"),
        (Fault(status=403, code="RequestTimeTooSkewed"), "did not read"),
        (Fault(keep=20), "did not read"),
    ],
    ids=["slow", "500", "busy", "clocks", "cut"],
)
def test_store_that_fails_costs_one_wait_and_one_warning(fault, match, server, sender, reader, tmp_path, compiled):
    url = fresh(server)
    pushed(sender(url), tmp_path / "from", 1, 2)
    cache = Cache(tmp_path / "a", remote=SharedStore(reader(url, seconds=0.5)))
    server.fault = lambda method, path: fault
    start = time.monotonic()
    with one_warning(f"continues without the shared store: .*{match}"):
        assert not cache.get(spec(1), ARCH)[1] and time.monotonic() - start < 4, "0.5 s, and a busy machine's rest"
        server.requests.clear()
        assert not cache.get(spec(2), ARCH)[1] and not server.requests, "it rests"


def test_store_that_was_down_is_asked_again(server, sender, reader, tmp_path, compiled, monkeypatch):
    url = fresh(server)
    pushed(sender(url), tmp_path / "from", 1, 2)
    cache = Cache(tmp_path / "a", remote=SharedStore(reader(url)))
    server.fault = lambda method, path: Fault(status=403, code="AccessDenied")
    with one_warning("continues without"):
        assert not cache.get(spec(1), ARCH)[1]
    server.fault = lambda method, path: None
    monkeypatch.setattr(remote, "REST_SECONDS", 0.0)
    monkeypatch.setattr(remote, "INDEX_SECONDS", 0.0)
    assert cache.get(spec(2), ARCH)[1]


def test_slow_answers_are_as_bad_as_none(server, sender, reader, tmp_path, compiled):
    """A request may take so long; not every one. The first, in which the client begins, is not counted."""
    url = fresh(server)
    pushed(sender(url), tmp_path / "from", 1, 2, 3)
    cache = Cache(tmp_path / "a", remote=SharedStore(reader(url, seconds=4.0)))
    assert cache.get(spec(1), ARCH)[1]
    server.fault = lambda method, path: Fault(delay=1.2)
    with one_warning("s for one kernel; expected at most"):
        assert cache.get(spec(2), ARCH)[1] and not cache.get(spec(3), ARCH)[1]


def test_full_store_is_still_read(server, sender, tmp_path, compiled):
    url = fresh(server)
    pushed(sender(url), tmp_path / "from", 3)
    cache = Cache(tmp_path / "a", remote=SharedStore(sender(url)))
    server.fault = lambda method, path: Fault(status=403, code="QuotaExceeded") if method == "PUT" else None
    with one_warning("continues without sending to the shared store:"):
        assert not cache.get(spec(1), ARCH)[1] and not cache.get(spec(2), ARCH)[1] and cache.get(spec(3), ARCH)[1]
    with pytest.raises(RemoteError, match="did not write"):
        exchange.push(SharedStore(sender(url)), [Layer(tmp_path / "a")])


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("nothing-knows-this://x", "cannot be opened|not installed"),
        ("s3://no-such-bucket-of-ssmgen/x", "continues without"),
        ("file:///dev/null/store", "continues without"),
    ],
)
def test_store_that_cannot_be(url, match, sender, tmp_path, compiled):
    with one_warning(match):
        assert not got(sender(url), tmp_path / "a")


def test_without_the_packages(sender, tmp_path, compiled, monkeypatch):
    for package in ("fsspec", "cryptography.exceptions"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            with one_warning(r"pip install 'ssmgen\[remote\]'"):
                assert not got(sender("memory://shared"), tmp_path / package)


def test_threads_fail_together_not_one_by_one(server, sender, reader, tmp_path, compiled):
    url = fresh(server)
    pushed(sender(url), tmp_path / "from", 1)
    cache = Cache(tmp_path / "a", remote=SharedStore(reader(url, seconds=0.5)))
    server.fault = lambda method, path: Fault(delay=3.0)
    start = time.monotonic()
    with warnings.catch_warnings(record=True):
        threads = [threading.Thread(target=cache.get, args=(spec(number), ARCH)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(compiled) == 8 and time.monotonic() - start < 3.5, "two waits at most, of 16 requests"


# Turns.


@costly(1)
def test_who_finds_a_claim_waits_for_what_is_sent(url, sender, tmp_path, compiled):
    first, second = SharedStore(sender(url)), SharedStore(sender(url))
    with first.turn(ONE.key, ONE.symbol, ARCH) as none:
        assert none is None
        threading.Timer(0.3, first.publish, (ONE,)).start()
        with no_warning(), second.turn(ONE.key, ONE.symbol, ARCH) as sent:
            assert sent == ONE


@costly(1)
def test_claim_of_the_dead_or_of_a_liar_delays_once(url, sender, tmp_path, compiled, monkeypatch):
    monkeypatch.setattr(remote, "CLAIM_SECONDS", 0.5)
    shared = SharedStore(sender(url))
    for number in (1, 2):
        shared.transport.put(f"v1/claims/{made(number).key}", b"dead")
    cache = Cache(tmp_path / "a", remote=shared)
    start = time.monotonic()
    with one_warning("waited 0.5 s in vain for a kernel from another process in"):
        assert not cache.get(spec(1), ARCH)[1] and not cache.get(spec(2), ARCH)[1]
    assert time.monotonic() - start < 5 and not shared.transport.names("v1/claims"), "and nobody else"


def test_failed_compilation_gives_its_turn_back(sender):
    shared = SharedStore(sender("memory://shared"))
    with pytest.raises(ZeroDivisionError), shared.turn(ONE.key, ONE.symbol, ARCH):
        assert shared.transport.names("v1/claims") == [ONE.key]
        raise ZeroDivisionError
    assert shared.transport.names("v1/claims") == []


@pytest.mark.matrix
def test_machines_that_start_cold_at_once(server, tmp_path, capsys):
    """Each kernel is compiled by few and fetched by the rest; then by none."""
    url, machines, kernels = fresh(server), 5, 4
    for name, writes in ("cold", True), ("warm", False):
        described = remote_of(url, tmp_path, writes) | server.variables | {"SSMGEN_CACHE_REMOTE_SECONDS": "60"}
        done = start_all(machines, kernels, 0.3, tmp_path / name, described)
        with capsys.disabled():
            print(f"\n{machines} processes, {kernels} kernels, {name} store: {summary(done)}", end="")
        assert not [one.warnings for one in done if one.warnings]
        assert sum(one.compiled + one.fetched for one in done) == machines * kernels
        assert sum(one.compiled for one in done) <= (2 * kernels if writes else 0)


def test_model_of_many_cold_starts(tmp_path):
    starts, kernels = 40, 3
    done, full = simulate(starts, kernels, 0.1, 0.005, tmp_path, "full")
    assert not sum(one.compiled for one in done)
    assert dict(full.requests) == {"GET whole index": starts, "GET objects": starts * kernels}
    done, empty = simulate(starts, kernels, 0.1, 0.005, tmp_path, "empty")
    assert sum(one.compiled for one in done) <= 2 * kernels
    assert empty.requests["PUT objects"] == sum(one.compiled for one in done)
    assert not [one.warnings for one in done if one.warnings]
