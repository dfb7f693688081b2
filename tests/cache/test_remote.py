"""A store that machines share: it is read through, and believed only where a trusted key vouches."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from remote_cases import MARKS, ONE, fresh, got, no_warning, one_warning, pushed
from selection import costly

from ssmgen.cache import exchange, remote
from ssmgen.cache.layer import Layer
from ssmgen.cache.remote import ALL, SharedStore, index_path, object_path
from ssmgen.cache.signing import Index, Signer
from ssmgen.cache.store import Cache
from ssmgen.errors import NotBuiltError, RemoteError
from ssmgen.settings import Remote
from tools.fleet.kernels import ARCH, made, spec
from tools.fleet.processes import ROOT

pytest_plugins = ["remote_cases"]
pytestmark = MARKS


@costly(1)
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
    with one_warning("does not use"):
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
    with one_warning("does not list the digests of entries for"):
        assert not got(reader("memory://shared"), tmp_path / "b")


def _made(file: Path) -> Path:
    Signer.make(file)
    return file


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("s3", lambda data: made(2).to_bytes()),
        ("memory", lambda data: replace(ONE, cubin=b"\x7fELF forged").to_bytes()),  # whole, with a matching digest
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
    with one_warning("differs from its index entry: truncated or altered"):
        assert not got(reader(url), tmp_path / "a")
    assert exchange.verify(SharedStore(reader(url))) == (0, [(found.path, "differs from its index entry: truncated or altered")])
    with one_warning("differs from its index entry: truncated or altered"):
        assert not got(sender(url), tmp_path / "b"), "compiled, and sent beside it"
    with one_warning("differs from its index entry: truncated or altered"):
        assert got(reader(url), tmp_path / "c"), "from what was sent beside it"
    assert exchange.push(shared, [Layer(tmp_path / "from")], again=True).sent == 1 and not exchange.verify(shared)[1]


def test_signed_listing_of_another_entry_under_this_key(sender, reader, tmp_path, compiled):
    """A signer may err: the loaded entry still belongs to the requested key."""
    shared = pushed(sender("memory://shared"), tmp_path / "from", 2)
    (found,) = exchange.listed(shared)
    shared.transport.put(index_path(shared.sender(), ARCH, ALL), Index(str(ARCH), {ONE.key: found.listed}).to_bytes(shared.signer()))
    with one_warning("has the contents of an entry with another name"):
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
    assert [reason for _, reason in exchange.verify(shared)[1]] == ["is listed and missing"]


@pytest.mark.parametrize("years", [-30, 30])
def test_clocks_that_disagree(years, sender, reader, tmp_path, compiled, monkeypatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + years * 365 * 86400)
    assert not got(sender("memory://shared"), tmp_path / "a")
    monkeypatch.setattr(time, "time", real)
    with no_warning():
        assert got(reader("memory://shared"), tmp_path / "b")
