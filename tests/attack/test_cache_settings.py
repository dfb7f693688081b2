"""Environment variables that lead nowhere: one clear error, or one warning and kernels in memory; never a raw error."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from cache_attacks import ARCH, NOBODY, got, in_child, public_directory, spec, use_fake_compiler
from click.testing import CliRunner

import ssmgen
from ssmgen import settings
from ssmgen.cache.store import Cache, shared_cache
from ssmgen.cli import main
from ssmgen.errors import SsmgenError
from ssmgen.select import tuned

COMMANDS = ["env", "cache path", "cache ls", "cache verify", "list"]
VARIABLES = ("SSMGEN_CACHE_DIR", "SSMGEN_CACHE_PATH", "SSMGEN_COMPILE", "XDG_CACHE_HOME", "HOME")


def told_with(uid: int | None = None, **variables: str) -> list[str]:
    """The warnings of a process with these variables that gets a kernel, after all commands have ended as they should."""

    def work() -> list[str]:
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(variables)
        use_fake_compiler()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert shared_cache().get(spec(), ARCH)[0].symbol == spec().name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for command in COMMANDS:
                done = CliRunner().invoke(main, command.split())
                assert done.exit_code == 0 and done.exception is None, (command, done.exception, done.output)
        return [str(w.message) for w in told]

    return in_child(work, uid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("below", ["home", "home/deeper", "home/.cache/x/y"])
def test_home_that_cannot_be_searched(below):
    with public_directory() as public:
        (public / "home").mkdir(mode=0o700)
        (told,) = told_with(NOBODY, HOME=str(public / below))
        assert told.startswith("ssmgen keeps compiled kernels in memory only:") and told.endswith("Permission denied")


@pytest.mark.parametrize("variable", ["SSMGEN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
@pytest.mark.parametrize("path", ["/tmp/" + "x" * 300, "/tmp" + "/x" * 2100, "/dev/null/cache", "/proc/nothing/cache"], ids=len)
def test_path_that_cannot_be(variable, path):
    (told,) = told_with(**{variable: path})
    assert told.startswith("ssmgen keeps compiled kernels in memory only:") and len(told.splitlines()) == 1


@pytest.mark.parametrize("path", ["/tmp/" + "x" * 300, "/dev/null/cache", "/nowhere"])
def test_layer_that_cannot_be(tmp_path, path):
    (told,) = told_with(SSMGEN_CACHE_DIR=str(tmp_path / "cache"), SSMGEN_CACHE_PATH=path)
    assert told.startswith(f"ssmgen ignores the cache layer {path}:")


def test_nul_in_a_path():
    hit, right, (told,) = in_child(got(Path("/tmp/a\0b")))
    assert not hit and right and "null" in told


def test_tilde_is_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSMGEN_CACHE_DIR", "~/mine")
    monkeypatch.setenv("SSMGEN_CACHE_PATH", "~/one:~/two")
    assert settings.cache_dir() == tmp_path / "mine"
    assert settings.read_only_layers() == [tmp_path / "one", tmp_path / "two"]


def test_home_of_nobody_is_an_error_that_names_the_variable(monkeypatch):
    for variable, read in (("SSMGEN_CACHE_DIR", settings.cache_dir), ("SSMGEN_CACHE_PATH", settings.read_only_layers)):
        monkeypatch.setenv(variable, "~no-such-user/cache")
        with pytest.raises(SsmgenError, match=f"{variable}='~no-such-user/cache' names a home directory that does not exist"):
            read()
        done = CliRunner().invoke(main, ["cache", "ls"])
        assert done.exit_code == 1 and variable in done.output and isinstance(done.exception, SystemExit)
        done = CliRunner().invoke(main, ["env"])
        assert done.exit_code == 0 and variable in done.output
        monkeypatch.delenv(variable)


def test_empty_is_unset(tmp_path, monkeypatch):
    monkeypatch.setenv("SSMGEN_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.cache_dir() == tmp_path / ".cache" / "ssmgen"


def test_relative_xdg_directory_is_ignored(tmp_path, monkeypatch):
    """As its specification demands."""
    monkeypatch.delenv("SSMGEN_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, expected in (("here", tmp_path / ".cache"), (str(tmp_path / "xdg"), tmp_path / "xdg")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert settings.cache_dir() == expected / "ssmgen"


@pytest.mark.parametrize("value", ["", "maybe", "ALLOW", "1"])
def test_compile_is_neither(tmp_path, monkeypatch, value):
    def work() -> str:
        use_fake_compiler()
        with pytest.raises(SsmgenError) as e:
            Cache(tmp_path).get(spec(), ARCH)
        assert isinstance(e.value, ValueError)
        return str(e.value)

    monkeypatch.setenv("SSMGEN_COMPILE", value)
    assert f"SSMGEN_COMPILE={value!r} is unknown; expected allow or deny" in in_child(work)
    for command in COMMANDS:
        done = CliRunner().invoke(main, command.split())
        assert done.exit_code == 0 and done.exception is None
    done = CliRunner().invoke(main, ["show", "slot_copy:slot_bytes=512,threads=32", "--sass"])
    assert done.exit_code in (0, 1) and (done.exit_code == 0 or "SSMGEN_COMPILE" in done.output)


def test_directory_of_bytes_that_are_no_text(tmp_path):
    """Runs in a separate process: the printed path must pass a terminal's encoding."""
    root = os.fsencode(tmp_path) + b"/\xff\x1b"
    env = {k: v for k, v in os.environ.items() if not k.startswith("SSMGEN_")} | {"PYTHONPATH": str(Path(ssmgen.__file__).parent.parent)}
    env = {os.fsencode(k): os.fsencode(v) for k, v in env.items()} | {b"SSMGEN_CACHE_DIR": root}
    done = subprocess.run([sys.executable, "-m", "ssmgen", "cache", "path"], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"\\udcff\\x1b\n")


def test_tuned_variants_make_private_directories_only(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "cache_dir", lambda: tmp_path / "deep" / "cache")
    in_child(lambda: tuned.write(tuned.overlay_path("NVIDIA X"), "NVIDIA X", []), umask=0)
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in (tmp_path / "deep").rglob("*") if path.is_dir())
    assert tuned.rows_of("NVIDIA X") == {}
