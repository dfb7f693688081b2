"""A store that machines share: it is read through, believed only where a trusted key vouches, and never stops a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner

from ssmgen import nvrtc
from ssmgen.cache import exchange, remote, store
from ssmgen.cache.layer import Layer
from ssmgen.cache.remote import ALL, SharedStore, index_path, object_path
from ssmgen.cache.signing import Index, Listed, Signer
from ssmgen.cache.store import Cache, shared_cache
from ssmgen.cli import main
from ssmgen.errors import ConfigError, NotBuiltError, RemoteError
from ssmgen.settings import ANYONE, Remote

if missing := [name for name in ("cryptography", "flask", "flask_cors", "moto", "s3fs") if find_spec(name) is None]:
    pytest.skip(f"the extra [test] has what is missing: {', '.join(missing)}", allow_module_level=True)

from tools.fleet.kernels import ARCH, made, spec
from tools.fleet.processes import ROOT, remote_of, start_all, summary
from tools.fleet.simulation import simulate
from tools.fleet.stand_in import Fault, s3
from tools.fleet.start import use_slept_compiler

ONE = made(1)


@pytest.fixture
def compiled(monkeypatch):
    """Seconds of each kernel that was compiled, which is a sleep of none."""
    monkeypatch.setattr(store, "render", store.render)
    for name in ("compile_cubin", "build_id", "options_for", "library_path"):
        monkeypatch.setattr(nvrtc, name, getattr(nvrtc, name))
    return use_slept_compiler(0.0)


@pytest.fixture(scope="module")
def server():
    with s3() as running:
        yield running


@pytest.fixture(autouse=True)
def no_faults(server, monkeypatch):
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    server.fault = lambda method, path: None
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def url_of(tmp_path, server):
    """The URL of an empty store of a kind."""
    return {"memory": "memory://shared", "file": f"file://{tmp_path}/shared", "s3": fresh(server)}.get


@pytest.fixture(params=["memory", "file", "s3"])
def url(request, url_of) -> str:
    return url_of(request.param)


def fresh(server) -> str:
    """A part of the bucket that nobody has used."""
    return f"{server.url}/{os.urandom(6).hex()}"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "key.pem"
    Signer.make(file)
    return file


@pytest.fixture
def sender(key_file):
    """A description of a store of which this key's entries are trusted, and that is written back to."""
    return lambda url, **more: Remote(url, **{"signing_key": key_file, "writes": True, **more})


@pytest.fixture
def reader(key_file):
    """The same for who has the public key alone, and reads."""
    return lambda url, **more: Remote(url, **{"trusted": (Signer.load(key_file).public,), **more})


def pushed(described: Remote, folder: Path, *numbers: int) -> SharedStore:
    """A store to which these kernels were pushed."""
    layer, shared = Layer(folder), SharedStore(described)
    for number in numbers:
        layer.write(made(number))
    assert exchange.push(shared, [layer]).sent == len(numbers)
    return shared


def got(described: Remote, folder: Path, number: int = 1) -> bool:
    """Whether a machine that begins with an empty directory found a kernel; it always gets the right one."""
    cache = Cache(folder, remote=SharedStore(described))
    entry, found = cache.get(spec(number), ARCH)
    assert entry.cubin == made(number).cubin and Cache(folder).get(spec(number), ARCH)[1], "kept in its directory"
    return found


@contextmanager
def one_warning(match: str):
    with pytest.warns(UserWarning, match=match) as told:
        yield
    assert len(told) == 1, [str(w.message) for w in told]


@contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# What it is for.


def test_what_one_machine_pushed_another_loads(url, sender, reader, tmp_path, compiled):
    pushed(sender(url), tmp_path / "from", 1, 2)
    with no_warning():
        assert got(reader(url), tmp_path / "a", 1) and got(reader(url), tmp_path / "a", 2) and not compiled
        assert not got(reader(url), tmp_path / "a", 3) and len(compiled) == 1


def test_what_was_compiled_is_sent_only_where_that_is_asked_for(url, sender, reader, tmp_path, compiled):
    with no_warning():
        assert not got(reader(url), tmp_path / "a") and not got(sender(url, writes=False), tmp_path / "b")
        assert not SharedStore(sender(url)).transport.names("v1")
        assert not got(sender(url), tmp_path / "c") and got(reader(url), tmp_path / "d") and len(compiled) == 3
    assert SharedStore(sender(url)).transport.names("v1/claims") == [], "taken back"


def test_compile_deny_reads_it(sender, reader, tmp_path, compiled, monkeypatch):
    pushed(sender("memory://shared"), tmp_path / "from", 1)
    monkeypatch.setenv("SSMGEN_COMPILE", "deny")
    assert got(reader("memory://shared"), tmp_path / "a")
    with pytest.raises(NotBuiltError):
        got(sender("memory://shared"), tmp_path / "a", 2)


def test_what_is_in_memory_or_a_directory_asks_nothing(server, sender, tmp_path, compiled):
    url = fresh(server)
    got(sender(url), tmp_path / "a")
    cache = Cache(tmp_path / "a", remote=SharedStore(sender(url)))
    server.requests.clear()
    assert cache.get(spec(1), ARCH)[1] and cache.get(spec(1), ARCH)[1] and not server.requests


def test_a_pushed_kernel_costs_one_request_and_the_index_one_for_all(server, sender, reader, tmp_path, compiled):
    url = fresh(server)
    pushed(sender(url), tmp_path / "from", 1, 2, 3)
    server.requests.clear()
    cache = Cache(tmp_path / "a", remote=SharedStore(reader(url)))
    assert all(cache.get(spec(number), ARCH)[1] for number in (1, 2, 3))
    assert dict(server.requests) == {"GET whole index": 1, "GET objects": 3}


def test_forked_child_asks_through_a_client_of_its_own(server, sender, reader, tmp_path, compiled):
    url = fresh(server)
    pushed(sender(url), tmp_path / "from", 1, 2, 3)
    cache = Cache(tmp_path / "a", remote=SharedStore(reader(url)))
    assert cache.get(spec(1), ARCH)[1]
    if not (child := os.fork()):
        os._exit(0 if cache.get(spec(2), ARCH)[1] and not compiled else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with no_warning():
        assert cache.get(spec(3), ARCH)[1], "the parent's client is as it was"


def test_importing_the_cache_imports_none_of_its_packages():
    program = (
        "import sys, ssmgen, ssmgen.cache.store\nnames = {m.partition('.')[0] for m in sys.modules}\n"
        "assert not names & {'fsspec', 's3fs', 'cryptography', 'torch'}, names\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


# Trust.


def test_unsigned_and_foreign_entries_are_loaded_only_where_anyone_is_trusted(sender, reader, tmp_path, compiled):
    url = "memory://shared"
    foreign = Signer.make(tmp_path / "foreign.pem")
    pushed(sender(url, signing_key=tmp_path / "foreign.pem"), tmp_path / "1", 1)
    pushed(Remote(url, anyone=True), tmp_path / "2", 2)
    with no_warning():
        assert not got(reader(url), tmp_path / "a", 1) and not got(reader(url), tmp_path / "a", 2)
        assert got(reader(url, anyone=True), tmp_path / "b", 1) and got(reader(url, anyone=True), tmp_path / "b", 2)
        assert got(reader(url, trusted=(foreign.public,)), tmp_path / "c", 1)
    assert exchange.foreign(SharedStore(reader(url))) == sorted([foreign.public, "unsigned"])
    with pytest.raises(RemoteError, match="SSMGEN_CACHE_REMOTE_SIGN"):
        exchange.push(SharedStore(reader(url)), [Layer(tmp_path / "2")])


def _forged(data: bytes) -> bytes:
    """Another digest under the signature that was there."""
    listed = Index.from_bytes(data, str(ARCH), None).entries
    other = Index(str(ARCH), {key: replace(item, digest="0" * 64) for key, item in listed.items()}).to_bytes(None)
    return data.partition(b"\n")[0] + b"\n" + other.partition(b"\n")[2]


def _unsigned(data: bytes) -> bytes:
    return Index(str(ARCH), Index.from_bytes(data, str(ARCH), None).entries).to_bytes(None)


@pytest.mark.parametrize(
    "change", [_forged, _unsigned, lambda data: data[:-9], lambda data: b"", lambda data: b"{" * 40000, lambda data: data[:80] + b"\n[]"]
)
def test_index_that_is_not_as_it_was_signed_is_not_believed(change, sender, reader, tmp_path, compiled):
    shared = pushed(sender("memory://shared"), tmp_path / "from", 1)
    path = index_path(shared.sender(), ARCH, ALL)
    shared.transport.put(path, change(shared.transport.get(path, 10**6)))
    with one_warning("does not use memory://shared/v1/index"):
        assert not got(reader("memory://shared"), tmp_path / "a")
    assert exchange.verify(SharedStore(reader("memory://shared")))[1][0][0] == path


def test_index_of_another_key_or_architecture_in_its_place(sender, reader, tmp_path, compiled):
    foreign = pushed(sender("memory://foreign", signing_key=_made(tmp_path / "foreign.pem")), tmp_path / "from", 1)
    shared = pushed(sender("memory://shared"), tmp_path / "from2", 2)
    theirs = foreign.transport.get(index_path(foreign.sender(), ARCH, ALL), 10**6)
    shared.transport.put(index_path(shared.sender(), ARCH, ALL), theirs)
    with one_warning("is not signed by"):
        assert not got(reader("memory://shared"), tmp_path / "a")
    other = Index("sm_80", {}).to_bytes(shared.signer())
    shared.transport.put(index_path(shared.sender(), ARCH, ALL), other)
    with one_warning("does not list digests of entries for sm_90a"):
        assert not got(reader("memory://shared"), tmp_path / "b")


def _made(file: Path) -> Path:
    Signer.make(file)
    return file


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("s3", lambda data: made(2).to_bytes()),
        ("memory", lambda data: replace(ONE, cubin=b"\x7fELF forged").to_bytes()),  # whole, with a digest of its own
        ("file", lambda data: data[: len(data) // 2]),
        ("memory", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ("memory", lambda data: b""),
    ],
    ids=["swapped", "forged", "truncated", "flipped", "empty"],
)
def test_object_that_is_not_what_was_signed_is_compiled_anew(kind, change, url_of, sender, reader, tmp_path, compiled):
    url = url_of(kind)
    shared = pushed(sender(url), tmp_path / "from", 1)
    (found,) = exchange.listed(shared)
    shared.transport.put(found.path, change(shared.transport.get(found.path, 10**6)))
    with one_warning("is not what the index says"):
        assert not got(reader(url), tmp_path / "a")
    assert exchange.verify(SharedStore(reader(url))) == (0, [(found.path, "is not what the index says: truncated or altered")])
    with one_warning("is not what the index says"):
        assert not got(sender(url), tmp_path / "b"), "compiled, and sent beside it"
    with one_warning("is not what the index says"):
        assert got(reader(url), tmp_path / "c"), "from what was sent beside it"
    assert exchange.push(shared, [Layer(tmp_path / "from")], again=True).sent == 1 and not exchange.verify(shared)[1]


def test_signed_listing_of_another_entry_under_this_key(sender, reader, tmp_path, compiled):
    """Whoever signs may err: what is loaded is an entry of the key that was asked for all the same."""
    shared = pushed(sender("memory://shared"), tmp_path / "from", 2)
    (found,) = exchange.listed(shared)
    shared.transport.put(index_path(shared.sender(), ARCH, ALL), Index(str(ARCH), {ONE.key: found.listed}).to_bytes(shared.signer()))
    with one_warning("is an entry of another name"):
        assert not got(reader("memory://shared"), tmp_path / "a")


def test_index_older_or_newer_than_the_entries(sender, reader, tmp_path, compiled, monkeypatch):
    url = "memory://shared"
    shared = pushed(sender(url), tmp_path / "from", 1)
    path = index_path(shared.sender(), ARCH, ALL)
    older = shared.transport.get(path, 10**6)
    pushed(sender(url), tmp_path / "from2", 2)
    newer = shared.transport.get(path, 10**6)
    shared.transport.put(path, older)
    with no_warning():
        assert not got(reader(url), tmp_path / "a", 2), "an older index costs a compilation"
        running = Cache(tmp_path / "b", remote=SharedStore(reader(url)))
        assert running.get(spec(1), ARCH)[1]
        shared.transport.put(path, newer)
        monkeypatch.setattr(remote, "INDEX_SECONDS", 0.0)
        assert running.get(spec(2), ARCH)[1], "read again after a while"
        shared.transport.remove(object_path(Index.from_bytes(newer, str(ARCH), None).entries[ONE.key].digest))
        assert not got(reader(url), tmp_path / "c", 1)
    assert [reason for _, reason in exchange.verify(shared)[1]] == ["is listed and not there"]


@pytest.mark.parametrize("years", [-30, 30])
def test_clocks_that_disagree(years, sender, reader, tmp_path, compiled, monkeypatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + years * 365 * 86400)
    assert not got(sender("memory://shared"), tmp_path / "a")
    monkeypatch.setattr(time, "time", real)
    with no_warning():
        assert got(reader("memory://shared"), tmp_path / "b")


# A store that is slow, down or full.


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
    with one_warning(f"goes on without the shared store: .*{match}"):
        assert not cache.get(spec(1), ARCH)[1] and time.monotonic() - start < 4, "0.5 s, and a busy machine's rest"
        server.requests.clear()
        assert not cache.get(spec(2), ARCH)[1] and not server.requests, "it rests"


def test_store_that_was_down_is_asked_again(server, sender, reader, tmp_path, compiled, monkeypatch):
    url = fresh(server)
    pushed(sender(url), tmp_path / "from", 1, 2)
    cache = Cache(tmp_path / "a", remote=SharedStore(reader(url)))
    server.fault = lambda method, path: Fault(status=403, code="AccessDenied")
    with one_warning("goes on without"):
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
    with one_warning("s for one kernel, more than 1"):
        assert cache.get(spec(2), ARCH)[1] and not cache.get(spec(3), ARCH)[1]


def test_full_store_is_still_read(server, sender, tmp_path, compiled):
    url = fresh(server)
    pushed(sender(url), tmp_path / "from", 3)
    cache = Cache(tmp_path / "a", remote=SharedStore(sender(url)))
    server.fault = lambda method, path: Fault(status=403, code="QuotaExceeded") if method == "PUT" else None
    with one_warning("goes on without sending to the shared store"):
        assert not cache.get(spec(1), ARCH)[1] and not cache.get(spec(2), ARCH)[1] and cache.get(spec(3), ARCH)[1]
    with pytest.raises(RemoteError, match="did not write"):
        exchange.push(SharedStore(sender(url)), [Layer(tmp_path / "a")])


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("nothing-knows-this://x", "cannot be opened|not installed"),
        ("s3://no-such-bucket-of-ssmgen/x", "goes on without sending"),
        ("file:///dev/null/store", "goes on without"),
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


def test_who_finds_a_claim_waits_for_what_is_sent(url, sender, tmp_path, compiled):
    first, second = SharedStore(sender(url)), SharedStore(sender(url))
    with first.turn(ONE.key, ONE.symbol, ARCH) as none:
        assert none is None
        threading.Timer(0.3, first.publish, (ONE,)).start()
        with no_warning(), second.turn(ONE.key, ONE.symbol, ARCH) as sent:
            assert sent == ONE


def test_claim_of_the_dead_or_of_a_liar_delays_once(url, sender, tmp_path, compiled, monkeypatch):
    monkeypatch.setattr(remote, "CLAIM_SECONDS", 0.5)
    shared = SharedStore(sender(url))
    for number in (1, 2):
        shared.transport.put(f"v1/claims/{made(number).key}", b"dead")
    cache = Cache(tmp_path / "a", remote=shared)
    start = time.monotonic()
    with one_warning("waited 0.5 s for a kernel that another process was to send"):
        assert not cache.get(spec(1), ARCH)[1] and not cache.get(spec(2), ARCH)[1]
    assert time.monotonic() - start < 5 and not shared.transport.names("v1/claims"), "and nobody else"


def test_failed_compilation_gives_its_turn_back(sender):
    shared = SharedStore(sender("memory://shared"))
    with pytest.raises(ZeroDivisionError), shared.turn(ONE.key, ONE.symbol, ARCH):
        assert shared.transport.names("v1/claims") == [ONE.key]
        raise ZeroDivisionError
    assert shared.transport.names("v1/claims") == []


def test_eight_machines_that_start_cold_at_once(server, tmp_path, capsys):
    """Each kernel is compiled by few and fetched by the rest; then by none."""
    url, kernels = fresh(server), 4
    for name, writes in ("cold", True), ("warm", False):
        described = remote_of(url, tmp_path, writes) | server.variables | {"SSMGEN_CACHE_REMOTE_SECONDS": "60"}
        done = start_all(8, kernels, 0.3, tmp_path / name, described)
        with capsys.disabled():
            print(f"\n8 processes, 4 kernels, {name} store: {summary(done)}", end="")
        assert not [one.warnings for one in done if one.warnings]
        assert sum(one.compiled + one.fetched for one in done) == 8 * kernels
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


# push, pull, verify.


def test_senders_at_once_lose_nothing(sender, tmp_path):
    def send(part: int) -> None:
        pushed(sender("memory://shared"), tmp_path / str(part), *range(3 * part, 3 * part + 3))

    threads = [threading.Thread(target=send, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = {found.key for found in exchange.listed(SharedStore(sender("memory://shared")))}
    assert keys == {made(number).key for number in range(12)}


def test_push_takes_in_what_processes_sent(url, sender, reader, tmp_path):
    shared = SharedStore(sender(url))
    shared.publish(made(1))
    layer = Layer(tmp_path / "from")
    layer.write(made(2))
    done = exchange.push(shared, [layer])
    assert (done.sent, done.there, done.listed) == (1, 0, 2)
    assert shared.transport.names(index_path(shared.sender(), ARCH)) == [ALL]
    assert exchange.push(shared, [layer]) == exchange.Pushed(0, 0, 1, 2)
    shared.publish(made(2))
    assert exchange.push(shared, []) == exchange.Pushed(0, 0, 0, 2) and shared.transport.names(index_path(shared.sender(), ARCH)) == [ALL]
    into = Layer(tmp_path / "to")
    assert exchange.pull(SharedStore(reader(url)), into) == (2, 0, []) and exchange.pull(SharedStore(reader(url)), into) == (0, 2, [])
    assert {entry.key for _, entry in into.entries()} == {made(1).key, made(2).key}
    assert exchange.pull(SharedStore(reader(url)), Layer(tmp_path / "none"), ["sm_80"]) == (0, 0, [])


def test_names_in_a_store_lead_nowhere_else(sender, tmp_path):
    shared = pushed(sender("memory://shared"), tmp_path / "from", 1)
    index = Index("../../..", {ONE.key: Listed("0" * 64, 1)}).to_bytes(shared.signer())
    shared.transport.put(f"{index_path(shared.sender())}/other/{ALL}", index)
    assert [found.arch for found in exchange.listed(shared)] == [str(ARCH)]


def command(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["cache", *words])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done.output


def test_commands(server, tmp_path, own_cache, monkeypatch):
    assert "SSMGEN_CACHE_REMOTE" in command("push", code=2)
    public = command("key", str(tmp_path / "key.pem")).strip()
    assert len(public) == 64 and command("key", str(tmp_path / "key.pem")).strip() == public
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("SSMGEN_CACHE_REMOTE", fresh(server))
    monkeypatch.setenv("SSMGEN_CACHE_REMOTE_SIGN", str(tmp_path / "key.pem"))
    Layer(tmp_path / "layer").write(ONE)
    Layer(own_cache).write(made(2))
    assert command("push", "--from", str(tmp_path / "layer")).startswith("1 entries sent")
    assert command("push").startswith("1 entries sent, 0.0 MiB; 0 were there; 2 are listed by " + public)
    monkeypatch.delenv("SSMGEN_CACHE_REMOTE_SIGN")
    assert "SSMGEN_CACHE_REMOTE_KEYS" in command("pull", code=1)
    monkeypatch.setenv("SSMGEN_CACHE_REMOTE_KEYS", public)
    assert "SSMGEN_CACHE_REMOTE_SIGN" in command("push", code=1)
    assert command("verify", "--remote") == "2 sound, 0 damaged\n"
    assert command("pull") == "1 entries written, 1 were there, 0 cannot be used\n"
    assert command("pull", "--out", str(tmp_path / "out")).startswith("2 entries written")
    shared = shared_cache().remote
    (found, _) = exchange.listed(shared)
    shared.transport.put(found.path, b"other")
    assert "is not what the index says" in command("verify", "--remote", code=1)
    assert "1 cannot be used" in command("pull", "--out", str(tmp_path / "out2"), code=1)


# The environment.


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"SSMGEN_CACHE_REMOTE": "/a/directory"}, "SSMGEN_CACHE_REMOTE='/a/directory' is no URL; a directory is file:///its/path"),
        ({}, "has nothing that is trusted"),
        ({"SSMGEN_CACHE_REMOTE_KEYS": "ab,12"}, "are no public keys|no public keys of 64 hex digits: ab, 12"),
        ({"SSMGEN_CACHE_REMOTE_TRUST": "yes"}, f"is neither signed nor {ANYONE}"),
        ({"SSMGEN_CACHE_REMOTE_WRITE": "yes"}, "is neither allow nor deny"),
        ({"SSMGEN_CACHE_REMOTE_KEYS": "a" * 64, "SSMGEN_CACHE_REMOTE_WRITE": "allow"}, "needs a key to sign with"),
        ({"SSMGEN_CACHE_REMOTE_KEYS": "a" * 64, "SSMGEN_CACHE_REMOTE_SECONDS": "nan"}, "is no number of seconds"),
        ({"SSMGEN_CACHE_REMOTE_SIGN": "/no/such/key"}, "cannot be read: No such file"),
        ({"SSMGEN_CACHE_REMOTE_SIGN": "/proc/self/cmdline"}, "is no PEM file"),
    ],
)
def test_settings_that_mean_nothing(given, match, own_cache, compiled, monkeypatch):
    for name, value in ({"SSMGEN_CACHE_REMOTE": "memory://shared"} | given).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=match):
        shared_cache().get(spec(1), ARCH)


def test_environment_of_a_reader(own_cache, key_file, sender, tmp_path, compiled, monkeypatch):
    pushed(sender("memory://shared"), tmp_path / "from", 1)
    monkeypatch.setenv("SSMGEN_CACHE_REMOTE", "memory://shared")
    monkeypatch.setenv("SSMGEN_CACHE_REMOTE_KEYS", f" {Signer.load(key_file).public.upper()} ,")
    assert shared_cache().get(spec(1), ARCH)[1]
    monkeypatch.setenv("SSMGEN_CACHE_REMOTE", "")
    assert shared_cache().remote is None
