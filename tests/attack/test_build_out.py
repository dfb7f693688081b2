"""`ssmgen build` into directories that cannot take its output, and builds interrupted while they compile."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from selection import costly

import ssmgen
from ssmgen.cache.layer import Layer
from ssmgen.cli import main
from ssmgen.spec.kernel import Arch

ROOT = Path(ssmgen.__file__).parent.parent
SPEC = "slot_copy:slot_bytes=4096"
MANY = [f"--spec=slot_copy:slot_bytes={n << 12}" for n in range(1, 13)]
root_only = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


def build(out: Path | str, *specs: str, code: int = 1) -> str:
    """The output of `build --out`."""
    result = CliRunner().invoke(main, ["build", *(specs or [f"--spec={SPEC}"]), f"--out={out}"])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def entries(out: Path) -> list[Path]:
    return list(out.glob("v1/*/*/*.ssmgen"))


def whole(out: Path) -> bool:
    """Whether each entry can be read."""
    return all(Layer(out).read(path.stem, Arch.parse(path.parent.parent.name)) for path in entries(out) if path.is_file())


def subprocess_of(*args: str, home: Path, **how) -> subprocess.Popen:
    env = {"HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "PYTHONWARNINGS": "ignore"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # under a limit on the size of files, the interpreter leaves truncated ones
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Ctrl-C is ignored where tests run in the background, and a child takes that over.
    heeded = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    return subprocess.Popen([sys.executable, "-m", "ssmgen", *args], env=env, cwd=home, **pipes, **heeded | how)


# Directories that take nothing: said before anything is compiled.


@pytest.fixture
def nothing_compiles(monkeypatch):
    def compiled(*args):
        raise AssertionError("compiled for a directory that takes nothing")

    monkeypatch.setattr("ssmgen.compile.nvrtc.compile_cubin", compiled)


def test_a_directory_that_everyone_may_write_to(tmp_path, nothing_compiles):
    (out := tmp_path / "out").mkdir()
    out.chmod(0o777)
    assert f"FileError: kernels cannot be kept: {out} is writable by everyone" in build(out)


@root_only
def test_a_directory_of_somebody_else(tmp_path, nothing_compiles):
    (out := tmp_path / "out").mkdir()
    os.chown(out, 4242, 4242)
    assert f"FileError: kernels cannot be kept: {out} belongs to user 4242" in build(out)


@pytest.mark.parametrize("out", ["/proc/x", "/proc/self/x", "/dev/null/x", "/tmp/" + "x" * 300])
def test_directories_that_cannot_be_made(out, nothing_compiles):
    assert f"FileError: kernels cannot be kept in {out}: " in build(out)


def test_a_file_in_the_way(tmp_path, nothing_compiles):
    (tmp_path / "file").write_text("mine")
    assert "is a file" in build(tmp_path / "file", code=2)
    assert "Not a directory" in build(tmp_path / "file" / "out")
    (tmp_path / "round").symlink_to("round")
    assert "FileError: kernels cannot be kept" in build(tmp_path / "round" / "out")
    assert (tmp_path / "file").read_text() == "mine"


@contextlib.contextmanager
def mounted(out: Path, options: str):
    """A separate file system."""
    out.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", str(out)], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(out)], check=True)


@root_only
def test_a_file_system_that_may_only_be_read(tmp_path, nothing_compiles):
    with mounted(tmp_path / "out", "ro"):
        assert "FileError: kernels cannot be kept" in (said := build(tmp_path / "out")) and "Read-only file system" in said


@pytest.mark.parametrize("option", [["build", f"--spec={SPEC}", "--out"], ["generate", "--dir"], ["generate", "--check", "--dir"]])
def test_an_empty_name_is_a_wrong_command_line(option, nothing_compiles, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("", "  ", "~nobody-of-this-name/x"):
        result = CliRunner().invoke(main, [*option, name])
        assert result.exit_code == 2 and "directory" in result.output, result.output + repr(result.exception)
    assert not list(tmp_path.iterdir())


def test_the_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert "1 compiled" in build("~/deep/out", code=0)
    assert len(entries(tmp_path / "deep/out")) == 1 and [p.name for p in tmp_path.iterdir()] == ["deep"]
    assert all(level.stat().st_mode & 0o777 == 0o700 for level in (tmp_path / "deep", tmp_path / "deep/out"))


# Directories that take only some files: the build fails and names every compiled file that is missing.


def check_said(said: str, out: Path, *words: str) -> None:
    """NotKeptError, the file, the reason; the files that exist are whole."""
    assert "NotKeptError: slot_copy" in said and f"{out}/v1/sm_90a/" in said, said
    assert any(word in said for word in words), said
    assert whole(out)


@root_only
def test_a_full_file_system(tmp_path):
    out = tmp_path / "out"
    with mounted(out, "size=48k"):
        said = build(out, *MANY, "--jobs=2")
        check_said(said, out, "No space left on device")
        assert 0 < len(entries(out)) < len(MANY) and "not begun" in said
        assert not list(out.glob("v1/*/*/.tmp-*")), "what cannot be finished is not left to fill the rest"


def test_a_limit_on_the_size_of_files(tmp_path):
    out = tmp_path / "out"
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))}
    with subprocess_of("build", f"--spec={SPEC}", f"--out={out}", home=tmp_path, **limited) as process:
        said = "".join(process.communicate(timeout=120))
    assert process.returncode == 1 and not entries(out)
    check_said(said, out, "File too large")


@pytest.mark.parametrize("where", ["v1", "v1/sm_90a"])
def test_a_file_where_a_directory_of_the_layer_should_be(where, tmp_path):
    file = tmp_path / "out" / where
    file.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "out").chmod(0o700)
    file.write_text("mine")
    said = build(tmp_path / "out")
    check_said(said, tmp_path / "out", "Not a directory", "File exists", "not a directory")
    assert file.read_text() == "mine"


def test_a_directory_where_an_entry_should_be(tmp_path):
    out = tmp_path / "out"
    build(out, code=0)
    (entry,) = entries(out)
    entry.unlink()
    (entry / "of mine").mkdir(parents=True)
    check_said(build(out, *MANY, "--jobs=1"), out, "directory")
    assert (entry / "of mine").is_dir()


def test_the_failing_variant_is_named_in_json(tmp_path, monkeypatch):
    def full(layer, entry):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Layer, "write", full)
    result = CliRunner().invoke(main, ["build", f"--spec={SPEC}", f"--out={tmp_path / 'out'}", "--json"])
    (row,) = json.loads(result.stdout)["variants"]
    assert result.exit_code == 1 and "No space left on device" in row["error"] and str(tmp_path / "out/v1/sm_90a") in row["error"]


def test_the_users_cache_is_no_exception(tmp_path, monkeypatch):
    """Kernels in the memory of a process that ends are not built."""
    (own := tmp_path / "cache").mkdir()
    own.chmod(0o777)
    monkeypatch.setenv("SSMGEN_CACHE_DIR", str(own))
    with pytest.warns(UserWarning, match="in memory only"):
        result = CliRunner().invoke(main, ["build", f"--spec={SPEC}"])
    assert result.exit_code == 1 and "FileError: the cache cannot be written" in result.output and "writable by everyone" in result.output
    assert "variants in" not in result.output, "before anything is compiled"


def test_what_a_layer_has_need_not_be_written(tmp_path, monkeypatch):
    build(tmp_path / "layer", code=0)
    (own := tmp_path / "cache").mkdir()
    own.chmod(0o777)
    monkeypatch.setenv("SSMGEN_CACHE_DIR", str(own))
    monkeypatch.setenv("SSMGEN_CACHE_PATH", str(tmp_path / "layer"))
    with pytest.warns(UserWarning, match="in memory only"):
        result = CliRunner().invoke(main, ["build", f"--spec={SPEC}"])
    assert result.exit_code == 0 and "0 compiled, 1 found, 0 failed" in result.output


# Ctrl-C.

SLOW = ["--model", "nemotron-h-8b", "--replay", "6", "--arch", "sm_80,sm_90a,sm_100a"]  # minutes, and seconds a variant among them


@costly(1)
@pytest.mark.parametrize("whom", ["process", "group"])
def test_ctrl_c_ends_a_build_within_two_seconds(whom, tmp_path):
    """The signal is sent as a terminal does, and twice: people press again. Complete files stay, and the same command finds them."""
    out = tmp_path / "out"
    with subprocess_of("build", *SLOW, "--jobs=4", f"--out={out}", home=tmp_path, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not entries(out) and time.monotonic() < deadline:
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            time.sleep(0.3)  # all four are at it again
            start = time.monotonic()
            for _ in range(2):
                (process.send_signal if whom == "process" else lambda signal: os.killpg(process.pid, signal))(signal.SIGINT)
                time.sleep(0.1)
            _, said = process.communicate(timeout=30)
            seconds = time.monotonic() - start
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert seconds < 2, f"{seconds:.1f} s: {said}"
    kept = entries(out)
    line = said.strip().splitlines()[-1]
    assert line.startswith("interrupted: ") and line.endswith(f"are kept in {out}. Run the same command again to continue."), said
    assert "Traceback" not in said and int(line.split()[1]) <= len(kept) < int(line.split()[3])
    assert whole(out)
