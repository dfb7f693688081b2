"""Tests marked `gpu` are skipped, with their reason, where torch sees no CUDA device. The cache of a test run is its own."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cards_of_tests
import pytest
import selection
import torch

# Test modules import each other and their support modules by names that are unique in all folders.
sys.path.extend(str(folder) for folder in sorted(Path(__file__).parent.rglob("*")) if folder.is_dir() and folder.name != "__pycache__")
pytest_plugins = ["native_build", "worker_memory"]
pytest.register_assert_rewrite("remote_cases")  # a plugin of some modules, which import it first

# One cache for the whole run and all its workers, unless the caller names one.
os.environ.setdefault("SSMGEN_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"ssmgen-tests-{os.getuid()}"))
os.environ.setdefault("SSMGEN_NATIVE", "deny")  # tests that are run with ssmgen-native and without build their own
for variable in [name for name in os.environ if name.startswith(("SSMGEN_CACHE_PATH", "SSMGEN_CACHE_REMOTE", "SSMGEN_COMPILE"))]:
    del os.environ[variable]

# Workers share the cards, too. torch counts them before it starts CUDA, and reads the variable again when it starts it.
if "PYTEST_XDIST_WORKER" in os.environ and (
    cards := cards_of_tests.order(
        int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    )
):
    os.environ["CUDA_VISIBLE_DEVICES"] = cards

# Workers share the processors: each with a thread per processor, they wait for each other.
torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        cards_of_tests.take_few(config.option)
    if config.get_verbosity() < 1:
        config.pluginmanager.register(FailuresAtOnce(config))


class FailuresAtOnce:
    """Prints the name of a failed test at once: pytest's own list comes at the end, which a run that is cut does not reach."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:  # workers have none
            terminal.write(f"\nFAILED {report.nodeid}\n")


class Unread(pytest.Item):
    """Stands for a file of tests/gpu where torch sees no card: reading all takes each worker 7 s."""

    def runtest(self) -> None:
        pytest.skip("needs a CUDA device, and torch sees none: this file is not read")

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


class UnreadFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        item = Unread.from_parent(self, name="tests")
        item.add_marker("gpu")
        yield item


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Without a card, files of tests/gpu are not read."""
    if module_path.parent.name == "gpu" and not torch.cuda.is_available():
        return UnreadFile.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Before -m selects tests, marks some of `costly` functions; after it, drops tests that need a card, or begins with the longest."""
    leave_out(config, items, selection.thin(items))
    yield
    leave_out(config, items, cardless(items))
    if torch.cuda.is_available():
        items.sort(key=cards_of_tests.turn)


def leave_out(config: pytest.Config, items: list[pytest.Item], gone: set[pytest.Item]) -> None:
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=[*gone])


def cardless(items: list[pytest.Item]) -> set[pytest.Item]:
    """Without a card one test of each file stands for all its tests that need one. Thousands would be reported otherwise."""
    if torch.cuda.is_available():
        return set()
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu") and not isinstance(item, Unread):
            files.setdefault(item.path, []).append(item)
    for alike in files.values():
        alike[0].add_marker(pytest.mark.skip(reason=f"needs a CUDA device, and torch sees none: {len(alike)} tests of this file"))
    return {item for alike in files.values() for item in alike[1:]}


@pytest.fixture(autouse=True)
def memory_goes_back() -> Iterator[None]:
    """Returns cached memory: other workers cannot use memory that a test leaves in the allocator's cache."""
    yield
    cards_of_tests.give_back()


@pytest.fixture
def room() -> Iterator[None]:
    """For tests of tens of GiB: one at a time on a machine. The memory of other tests is given back before and after."""
    path = Path(tempfile.gettempdir(), f"ssmgen-tests-{os.getuid()}-room")
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def one_thread():
    """For modules whose tensors are small: workers share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_compile(monkeypatch):
    """For reports, which state how long compilers took: a test's first is real, and stands for the others."""
    from compiled import compile_once

    compile_once(monkeypatch)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache directory for one test."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("SSMGEN_CACHE_DIR", str(directory))
    return directory
