"""The bound on a worker's memory: a run that passes it fails, and names the test."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import worker_memory
from selection import costly

pytestmark = pytest.mark.skipif(not worker_memory.STATUS.exists(), reason="needs Linux's /proc")

SUITE = """
import subprocess, sys
def test_before(): pass
def test_large(): {large}
def test_behind(): pass
"""
LARGE = {
    "itself": "assert len(b'x' * (300 << 20))",
    "child": "subprocess.run([sys.executable, '-c', 'assert len(b\"x\" * (300 << 20))'], check=True)",
}


def run(directory: Path, large: str, bound: int, *options: str) -> tuple[int, str]:
    """(exit status, output) of a run of three tests, of which the second takes 300 MiB."""
    (directory / "test_suite.py").write_text(SUITE.format(large=LARGE[large]))
    plugins = ["-p", "worker_memory", "-p", "xdist"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-o", f"worker_memory_mib={bound}", *options, "test_suite.py"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(Path(worker_memory.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@costly(1)
@pytest.mark.parametrize(("large", "workers"), [("itself", "0"), ("itself", "1"), ("child", "0")])
def test_the_test_that_passes_the_bound_is_named_and_the_run_fails(tmp_path, large, workers):
    code, said = run(tmp_path, large, 250, "-n", workers)
    assert code == 1 and "3 passed, 1 error" in said, said
    assert "ERROR test_suite.py::test_large" in said and "MiB since test_suite.py::test_large, more than the 250" in said


def test_below_the_bound_the_run_passes_and_says_how_much_was_held(tmp_path):
    code, said = run(tmp_path, "itself", 1024, "-n", "1")
    assert code == 0 and "Most memory held: a worker 3" in said, said


def test_collections_are_rare_and_skip_the_tests_themselves():
    """Fails after a test that unfreezes the run's objects: each full collection then takes 1 s."""
    assert gc.isenabled() and gc.get_threshold() == worker_memory.SELDOM and gc.get_freeze_count() > 10_000


FREED = """
import worker_memory
{configure}
one = b"x" * (30 << 20)
del one
before = worker_memory.held("VmRSS")
blocks = [(b"x" * (2 << 20), b"x" * (100 << 10)) for _ in range(20)]
small = [b for _, b in blocks]
del blocks
print(worker_memory.held("VmRSS") - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
@pytest.mark.parametrize("configured", [True, False])
def test_large_blocks_go_back_when_they_are_freed(configured):
    """This also holds after a larger block, and with small blocks between that stay allocated. An own process measures it: in a worker,
    other threads allocate meanwhile. Without the plugin's setting, most of the 40 MiB stay."""
    code = FREED.format(configure="worker_memory.pytest_configure()" if configured else "")
    env = os.environ | {"PYTHONPATH": str(Path(worker_memory.__file__).parent)}
    left = int(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout)
    assert left < 15 if configured else left > 25


def gated(x):
    return torch.nn.functional.silu(x)


def guards() -> int:
    """The number of compiled graphs whose guards are held."""
    gc.collect()
    return sum(type(each).__qualname__ == "CheckFunctionManager" for each in gc.get_objects())


def test_compiled_graphs_are_forgotten_with_their_guards():
    """Functions of torch outlive a graph that calls them, and hold its guards even after torch's reset."""
    worker_memory.forget_graphs()
    before = guards()
    torch.compile(gated, backend="eager", fullgraph=True)(torch.ones(1))
    torch._dynamo.reset()
    if guards() == before:
        pytest.skip("this torch forgets guards itself")
    worker_memory.forget_graphs()
    assert guards() == before


def test_this_suite_is_bounded(pytestconfig):
    assert pytestconfig.getini("worker_memory_mib") == "1024"
    assert pytestconfig.pluginmanager.has_plugin("worker_memory")


@pytest.mark.parametrize(("cuda", "more"), [(None, 0), ("13.0", worker_memory.LIBRARIES)])
def test_a_cuda_build_of_torch_may_hold_its_libraries(monkeypatch, pytestconfig, cuda, more):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert worker_memory.bound_of(pytestconfig) == 1024 + more


def test_no_option_narrows_what_a_command_selects(pytestconfig):
    """`-m gpu` takes all tests that need a GPU, including tests of the matrix."""
    assert not pytestconfig.getini("addopts")
