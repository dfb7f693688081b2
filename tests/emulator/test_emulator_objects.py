"""Kernels that the emulator compiled are kept for later processes, as code is: private, whole, and of the same text and compiler."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from emulated_calls import needs_emulator
from test_emulator import launch_on

from ssmgen import emulator
from ssmgen.cache import objects
from ssmgen.cache.upkeep import objects as kept_in
from ssmgen.cli import main

pytestmark = needs_emulator


@pytest.fixture(scope="module", autouse=True)
def machine():
    """Loaded ahead, from the run's own cache."""
    emulator._machine()


@pytest.fixture
def another(own_cache, monkeypatch):
    """Runs a kernel like a process that has compiled nothing yet. Returns how often g++ was called for kernels."""
    compiled = []
    compile_ = emulator._compile
    monkeypatch.setattr(emulator, "_compile", lambda what, *more: (compiled.append(what), compile_(what, *more)))

    def run(number: int = 37) -> list[str]:
        compiled.clear()
        for library in (path for path in emulator._workplace().glob("*.so") if path.name != "machine.so"):
            library.unlink()
        emulator.compile_source.cache_clear()
        launch_on(torch.zeros(1024), number)
        return list(compiled)

    yield run
    emulator.compile_source.cache_clear()


def files(cache):
    return sorted((cache / "emulator").rglob("*.ssmgen"))


def test_a_later_process_compiles_nothing(another, own_cache):
    assert len(another()) == 1
    (file,) = files(own_cache)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert another() == []


@pytest.mark.parametrize("change", ["cut", "altered", "another text", "writable by everyone"])
def test_what_is_not_believed_is_compiled_again(change, another, own_cache):
    another()
    (file,) = files(own_cache)
    data = bytearray(file.read_bytes())
    if change == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif change == "altered":
        data[-100] ^= 1
        file.write_bytes(data)
    elif change == "another text":
        another(41)
        (other,) = set(files(own_cache)) - {file}
        file.write_bytes(other.read_bytes())
    else:
        file.chmod(0o666)
    assert len(another()) == 1
    assert another() == []


def test_of_another_compiler_nothing_is_taken(another, own_cache, monkeypatch):
    another()
    monkeypatch.setattr(objects, "compiler", lambda: "g++ 99.0 x86_64-linux-gnu")
    assert len(another()) == 1 and len(files(own_cache)) == 2


def test_a_directory_that_everyone_may_write_is_not_used(another, own_cache):
    another()
    (own_cache / "emulator").chmod(0o777)
    with pytest.warns(UserWarning, match="writable by everyone"):
        assert len(another()) == 1


def test_clear_removes_them(another, own_cache):
    another()
    assert kept_in(own_cache).version_dir.exists()
    assert CliRunner().invoke(main, ["cache", "clear"]).exit_code == 0 and files(own_cache) == []
