"""An operator's commands for a store that machines share: push, pull, verify; and the environment that describes it."""

from __future__ import annotations

import threading

import pytest
from click.testing import CliRunner
from remote_cases import MARKS, ONE, fresh, got, no_warning, one_warning, pushed

from ssmgen.cache import exchange
from ssmgen.cache.layer import Layer
from ssmgen.cache.remote import ALL, SharedStore, index_path
from ssmgen.cache.signing import Index, Listed, Signer
from ssmgen.cache.store import shared_cache
from ssmgen.cli import main
from ssmgen.errors import ConfigError
from ssmgen.settings import ANYONE
from tools.fleet.kernels import ARCH, made, spec

pytest_plugins = ["remote_cases"]
pytestmark = MARKS


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


def test_push_signs_nothing_that_somebody_else_wrote(sender, tmp_path):
    """Not even where anyone is trusted: whoever trusts the key does not."""
    described = sender("memory://shared", anyone=True)
    shared = pushed(described, tmp_path / "from", 1)
    for name in (ALL, made(2).key):
        forged = Index(str(ARCH), {made(2).key: shared.send(made(2))}).to_bytes(None)
        shared.transport.put(index_path(shared.sender(), ARCH, name), forged)
    assert exchange.push(shared, [Layer(tmp_path / "from")]).listed == 1
    assert [found.key for found in exchange.listed(SharedStore(sender("memory://shared")))] == [made(1).key]


def test_push_prefers_what_processes_sent_beside_a_damaged_entry(sender, reader, tmp_path, compiled):
    shared = pushed(sender("memory://shared"), tmp_path / "from", 1)
    (found,) = exchange.listed(shared)
    shared.transport.put(found.path, b"damaged")
    with one_warning("differs from its index entry: truncated or altered"):
        assert not got(sender("memory://shared"), tmp_path / "a")
    exchange.push(shared, [])
    with no_warning():
        assert got(reader("memory://shared"), tmp_path / "b")


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
    assert "differs from its index entry: truncated or altered" in command("verify", "--remote", code=1)
    assert "1 cannot be used" in command("pull", "--out", str(tmp_path / "out2"), code=1)


# The environment.


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"SSMGEN_CACHE_REMOTE": "/a/directory"}, "SSMGEN_CACHE_REMOTE='/a/directory' is not a URL; expected one such as s3://bucket/path"),
        ({}, "is set and no key is trusted"),
        ({"SSMGEN_CACHE_REMOTE_KEYS": "ab,12"}, "SSMGEN_CACHE_REMOTE_KEYS='ab,12' has invalid keys, ab, 12"),
        ({"SSMGEN_CACHE_REMOTE_TRUST": "yes"}, f"is unknown; expected signed or {ANYONE}"),
        ({"SSMGEN_CACHE_REMOTE_WRITE": "yes"}, "is unknown; expected allow or deny"),
        ({"SSMGEN_CACHE_REMOTE_KEYS": "a" * 64, "SSMGEN_CACHE_REMOTE_WRITE": "allow"}, "is set and there is no key to sign with"),
        (
            {"SSMGEN_CACHE_REMOTE_KEYS": "a" * 64, "SSMGEN_CACHE_REMOTE_SECONDS": "nan"},
            "is not a number of seconds; expected above 0 and at most 3600",
        ),
        ({"SSMGEN_CACHE_REMOTE_SIGN": "/no/such/key"}, "cannot be read: No such file"),
        ({"SSMGEN_CACHE_REMOTE_SIGN": "/proc/self/cmdline"}, "is not a PEM file of a private key; expected one without a password"),
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
