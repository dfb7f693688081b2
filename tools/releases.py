"""CI's steps that try other releases than the constraints have: `newest`, `newest_torch`, `oldest`. They report, and fail nothing.

`python -m tools.releases transformers==5.15.0` tries the releases that are named, on top of this environment.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch
from packaging.utils import canonicalize_name
from packaging.version import Version

from . import constraints

ROOT = Path(__file__).parents[1]
# Releases of other packages broke these: all tests that call transformers, and the package's own.
TESTS = ("hf*", "accelerate*", "demo*", "docs*", "package", "ops", "tools", "nvrtc", "wheel")
VERSIONS = "import importlib.metadata as m, json; print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"


def newest() -> str:
    """Tries the newest releases of the packages in pyproject.toml and of their requirements; torch stays. Returns a summary."""
    try:
        newer = constraints.newer()
    except constraints.ConstraintsError as e:
        return f"pip could not say what is newer, so nothing was tried:\n{e}"
    if not newer:
        return "every package that pyproject.toml names is installed in its newest release; nothing to try"
    torch_here = f"torch=={Version(torch.__version__).public}"
    wanted = [f"{name}=={version}" for name, version in newer.items()]

    def install(python: Python) -> None:
        python.pip("--upgrade", "--upgrade-strategy", "eager", torch_here, *wanted)

    return _tried(install, layered=True)


def newest_torch() -> str:
    """Tries the newest release of everything, torch included, in an empty environment. Returns a summary."""

    def install(python: Python) -> None:
        python.pip("torch")
        python.pip("-e", f"{ROOT}[{python.extra()},{','.join(constraints.EXTRAS)}]")

    return _tried(install)


def oldest() -> str:
    """Tries the oldest releases that pyproject.toml promises of the packages that users need. Returns a summary."""

    def install(python: Python) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(lowest()))
            file.flush()
            python.pip("-c", file.name, "torch")  # first: the extra must fit the CUDA of this release
            python.pip("-c", file.name, "-e", f"{ROOT}[{python.extra()},hf,test]")

    return _tried(install, interpreter=_oldest_python())


def _oldest_python() -> str:
    """The oldest Python that is promised, where it is installed; otherwise this one."""
    name = "python" + constraints.project()["requires-python"].removeprefix(">=")
    found = shutil.which(name)
    if found is None or subprocess.run([found, "-c", "import ensurepip, venv"], capture_output=True).returncode:
        print(f"{name} is not installed: trying the oldest releases with {sys.version.split()[0]}", flush=True)
        return sys.executable
    return found


def these(*requirements: str) -> str:
    """Tries these releases, on top of this environment; everything else stays. Returns a summary."""
    return _tried(lambda python: python.pip(*requirements), layered=True)


def lowest() -> list[str]:
    """Constraints that pin the requirements of ssmgen and its extra `hf` to their lower bounds. Packages for tests stay free."""
    found = []
    for requirement in constraints.named(extras=("hf",)):
        (least,) = (clause.version for clause in requirement.specifier if clause.operator == ">=")
        found.append(f"{requirement.name}=={least}")
    return found


class Python:
    """The interpreter of an environment."""

    def __init__(self, path: Path):
        self.path = path

    def pip(self, *words: str) -> None:
        """Raises CalledProcessError."""
        subprocess.run([self.path, "-m", "pip", "install", "-q", *words], cwd=ROOT, check=True)

    def extra(self) -> str:
        """The extra that fits the torch installed there."""
        command = [self.path, "-m", "tools.extra"]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _tried(install: Callable[[Python], None], layered: bool = False, interpreter: str = sys.executable) -> str:
    """Makes an environment of an interpreter and runs TESTS in it. layered: packages that it lacks are found in this environment."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        subprocess.run([interpreter, "-m", "venv", root / "venv"], check=True)
        python = Python(root / "venv" / "bin" / "python")
        if layered:
            (site,) = (root / "venv" / "lib").glob("python*/site-packages")
            below = [path for path in sys.path if path.endswith("site-packages")]
            (site / "below.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in below))
        try:
            install(python)
        except subprocess.CalledProcessError as e:
            return f"pip could not install these releases, so nothing was tried: exit code {e.returncode}"
        if layered:
            _link_nvidia(site, below)
        files = sorted(str(path.relative_to(ROOT)) for name in TESTS for path in (ROOT / "tests").rglob(f"test_{name}.py"))
        report = root / "tests.xml"
        subprocess.run([python.path, "-m", "pytest", "-q", "-n", "2", "-m", "not matrix", f"--junitxml={report}", *files], cwd=ROOT)
        said = subprocess.run([python.path, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout
        return _told(json.loads(said), report)


def _link_nvidia(site: Path, below: Sequence[str]) -> None:
    """Shows the libraries of CUDA's packages in an environment that lacks them: the CUDA bindings look into its own site-packages only.

    Called after pip, which would otherwise write through the link.
    """
    found = [Path(path, "nvidia") for path in below if Path(path, "nvidia").is_dir()]
    if found and not (site / "nvidia").exists():
        (site / "nvidia").symlink_to(found[0])


def _told(installed: Mapping[str, str], report: Path) -> str:
    """A summary: packages that differ from the constraints, and failed tests. report: pytest's file; missing if pytest could not run."""
    pinned = constraints.pinned(constraints.here())
    found = {canonicalize_name(name): Version(version).public for name, version in installed.items()}
    others = [
        f"  {name} {found[name]}, the constraints have {pinned[name]}" for name in pinned if found.get(name, pinned[name]) != pinned[name]
    ]
    if not report.is_file():
        return "\n".join(["pytest itself failed with these releases:", *others])
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None  # pytest writes one
    failed = [f"  {case.get('classname')}::{case.get('name')}" for case in suite.iter("testcase") if case.find("failure") is not None]
    broken = [f"  {case.get('classname')}::{case.get('name')}" for case in suite.iter("testcase") if case.find("error") is not None]
    ran = int(suite.attrib["tests"]) - int(suite.attrib["skipped"])
    lines = ["installed in other releases than the constraints have:", *(others or ["  none"])]
    return "\n".join(
        [*lines, f"{len(failed)} of {ran} tests failed, {len(broken)} had errors" + ":" * bool(failed or broken), *failed, *broken]
    )


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m tools.releases REQUIREMENT …, such as transformers==5.15.0")
    print(these(*sys.argv[1:]))
