"""Stores that machines share: fixtures, which modules load as a plugin, and the machines' actions."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest

from ssmgen.cache import exchange, store
from ssmgen.cache.layer import Layer
from ssmgen.cache.remote import SharedStore
from ssmgen.cache.signing import Signer
from ssmgen.cache.store import Cache
from ssmgen.compile import nvrtc
from ssmgen.settings import Remote
from tools.fleet.kernels import ARCH, made, spec
from tools.fleet.stand_in import s3
from tools.fleet.start import use_slept_compiler

MISSING = [name for name in ("cryptography", "flask", "flask_cors", "moto", "s3fs") if find_spec(name) is None]
MARKS = [
    pytest.mark.skipif(bool(MISSING), reason=f"the extra [test] has what is missing: {', '.join(MISSING)}"),
    pytest.mark.usefixtures("no_faults"),
]
ONE = made(1)


@pytest.fixture
def compiled(monkeypatch):
    """Seconds of each compiled kernel; compilation is replaced by a sleep of zero."""
    monkeypatch.setattr(store, "render", store.render)
    for name in ("compile_cubin", "build_id", "options_for", "library_path"):
        monkeypatch.setattr(nvrtc, name, getattr(nvrtc, name))
    return use_slept_compiler(0.0)


@pytest.fixture(scope="session")  # one of a worker: fsspec keeps its clients, and with them the endpoint
def server():
    with s3() as running:
        yield running


@pytest.fixture
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
    """A part of the bucket that has not been used."""
    return f"{server.url}/{os.urandom(6).hex()}"


@pytest.fixture(scope="session")
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
