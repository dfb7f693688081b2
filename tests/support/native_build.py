"""ssmgen-native as the checkout has it, built once for all workers and runs of the same sources; and tests of calls with it and without."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = Path(__file__).parents[2] / "native"


@functools.cache
def module() -> ModuleType:
    """The module. Skips the test, with the reason, where it cannot be built."""
    import torch

    if not shutil.which("g++"):
        pytest.skip("needs g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs Python's headers")
    if not importlib.util.find_spec("setuptools"):
        pytest.skip("needs setuptools")
    said = (sys.version, torch.__version__, *(p.read_text() for p in sorted(SOURCES.iterdir()) if p.is_file()))
    folder = Path(tempfile.gettempdir(), f"ssmgen-tests-native-{os.getuid()}", hashlib.sha256("\0".join(said).encode()).hexdigest()[:16])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder, "--build-temp", folder / "objects"]
            done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            (folder / "built").touch()
    (file,) = folder.glob("ssmgen_native*.so")
    spec = importlib.util.spec_from_file_location("ssmgen_native", file)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    sys.modules.pop("ssmgen_native", None)  # it is not installed, for tests that do not ask for it
    return made


@pytest.fixture(params=["python", "native"])
def way(request, monkeypatch) -> Iterator[str]:
    """The code that makes repeated calls: native or Python. No call is known from before."""
    from ssmgen.calls import fast_path
    from ssmgen.launch import native

    made = module() if request.param == "native" else None
    monkeypatch.setattr(native, "found", lambda: made)
    fast_path.forget()
    yield request.param
    fast_path.forget()
