"""The versions in constraints/, the README's install lines, and the packages that these lines install or replace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from selection import costly

from tools import constraints, extra, releases

ROOT = Path(__file__).parents[2]
FILES = sorted(constraints.FOLDER.glob("*.txt"))


def environment(path: Path) -> dict[str, str]:
    """The environment of markers under the Python of a constraints file."""
    return {"python_version": path.stem.removeprefix("python"), "extra": ""}


def test_there_is_a_file_for_each_python():
    assert [path.name for path in FILES] == [f"python3.{minor}.txt" for minor in (11, 12, 13)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_public_versions_that_the_project_allows(path):
    lines = path.read_text().removeprefix(constraints.HEAD).splitlines()
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)
    pinned = constraints.pinned(path)
    assert [*pinned] == sorted(pinned) and not [name for name in pinned if constraints.OF_TORCH.match(name)]
    asked = [r for r in constraints.named() if r.marker is None or r.marker.evaluate(environment(path))]
    wrong = [str(r) for r in asked if pinned.get(canonicalize_name(r.name), "0") not in r.specifier]
    assert len(asked) > 20 and not wrong


def test_all_files_have_one_torch_and_one_transformers():
    assert len({(constraints.pinned(path)["torch"], constraints.pinned(path)["transformers"]) for path in FILES}) == 1


def test_the_file_of_this_environment_names_all_that_is_needed():
    """Walks through the installed packages, only if they have the file's versions: other releases may need other packages."""
    if not constraints.here().is_file():
        pytest.skip("no constraints for this Python")
    pinned, needed = constraints.pinned(constraints.here()), constraints.needed(extras=("test",))
    others = {name for name, version in needed.items() if pinned.get(name, version) != version}
    if others:
        pytest.skip(f"installed in other versions than the constraints have: {', '.join(sorted(others))}")
    assert "pluggy" in needed and "numpy" in needed and not needed.keys() - pinned.keys()


def test_what_is_written_is_read_again(tmp_path):
    versions = {"a-b": "1.0", "torch": "2.13.0"}
    (tmp_path / "python3.11.txt").write_text(constraints.written(versions))
    assert constraints.pinned(tmp_path / "python3.11.txt") == versions


def test_a_local_version_is_not_pinned(monkeypatch):
    class Installed:
        version, requires = "2.13.0+cpu", ["triton", "nvidia-nccl-cu13", "colorama; sys_platform == 'win32'"]

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed)
    assert constraints.needed("torch", ()) == {"torch": "2.13.0"}


def test_the_readmes_test_command_uses_the_file_of_its_python():
    (line,) = re.findall(r"^python3 -m venv .*pytest.*", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert line.count("pip install") == line.count("pip install -q -c $c ") == 2 and "$(.venv/bin/python -m tools.extra)" in line
    named = re.search(r"c=(constraints/\$\(ls \.venv/lib\)\.txt) &&", line)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert named and ROOT / named[1].replace("$(ls .venv/lib)", python) == constraints.here()


def test_lowest_versions_are_those_of_the_project():
    lines = releases.lowest()
    assert {"torch", "transformers", "click"} <= {Requirement(line).name for line in lines} and "pytest" not in str(lines)
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in lines)


def test_the_test_extra_admits_the_lowest_versions():
    """Otherwise pip cannot install the versions that `oldest` tries."""
    lowest = dict(line.split("==") for line in releases.lowest())
    wrong = [str(r) for r in constraints.named(("hf", "test")) if r.name in lowest and lowest[r.name] not in r.specifier]
    assert not wrong


def test_oldest_takes_the_oldest_python_that_is_promised(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(releases.shutil, "which", lambda name: asked.append(name) or sys.executable)
    assert releases._oldest_python() == sys.executable and asked == ["python3.10"] and not capsys.readouterr().out
    monkeypatch.setattr(releases.shutil, "which", lambda name: "/bin/false")  # as a shim of a version that is not installed
    assert releases._oldest_python() == sys.executable and "python3.10 is not installed" in capsys.readouterr().out


def test_a_report_names_packages_and_tests(tmp_path, monkeypatch):
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite tests="3" skipped="1"><testcase classname="tests.test_hf" name="test_a"><failure/></testcase>'
        '<testcase classname="tests.test_hf" name="test_b"><skipped/></testcase><testcase classname="c" name="d"/></testsuite></testsuites>'
    )
    monkeypatch.setattr(constraints, "here", lambda: constraints.path_of((3, 11)))
    pinned = constraints.pinned(constraints.here())
    told = releases._told({**pinned, "torch": f"{pinned['torch']}+cpu", "Transformers": "99.1"}, report)
    assert told.splitlines() == [
        "installed in other releases than the constraints have:",
        f"  transformers 99.1, the constraints have {pinned['transformers']}",
        "1 of 2 tests failed, 0 had errors:",
        "  tests.test_hf::test_a",
    ]
    assert "pytest itself failed" in releases._told(pinned, tmp_path / "none.xml")


class Recorded:
    """An interpreter that installs nothing."""

    def __init__(self):
        self.installed: list[tuple[str, ...]] = []

    def pip(self, *words: str) -> None:
        self.installed.append(words)

    def extra(self) -> str:
        return "cu12" if any("torch" in words for words in self.installed) else "none"


@pytest.mark.parametrize("step", ["newest_torch", "oldest"])
def test_the_extra_fits_the_torch_that_the_step_has_installed(step, monkeypatch):
    python = Recorded()
    monkeypatch.setattr(releases, "_tried", lambda install, **options: install(python))
    getattr(releases, step)()
    first, second = python.installed
    assert "torch" in first and re.search(r"\[cu12,", second[-1])


def test_named_releases_are_tried_on_top_of_this_environment(monkeypatch):
    python, told = Recorded(), {}
    monkeypatch.setattr(releases, "_tried", lambda install, **options: told.update(options) or install(python))
    releases.these("transformers==5.15.0")
    assert python.installed == [("transformers==5.15.0",)] and told == {"layered": True}


def test_nothing_is_tried_where_nothing_is_newer(monkeypatch):
    monkeypatch.setattr(releases, "_tried", lambda *args, **kwargs: pytest.fail("tried"))
    monkeypatch.setattr(constraints, "newer", dict)
    assert "nothing to try" in releases.newest()

    def unreachable():
        raise constraints.ConstraintsError("no route to host")

    monkeypatch.setattr(constraints, "newer", unreachable)
    assert "no route to host" in releases.newest()


# pip with an installed torch. The wheels have metadata only, and pip finds them in a folder: no network.


def wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    extras = [f"Provides-Extra: {extra}" for extra in ("cu12", "cu13") if name == "ssmgen"]
    with zipfile.ZipFile(path, "w") as archive:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *extras, *(f"Requires-Dist: {r}" for r in requires)]
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """resolved(torch, extra): {name: version} that pip would install with ssmgen[extra], if this torch is installed."""
    folder = tmp_path_factory.mktemp("wheels")
    for major, package in ("12.9.1", "nvidia-cuda-nvrtc-cu12"), ("13.0.3", "nvidia-cuda-nvrtc"), ("13.5.0", "nvidia-cuda-nvrtc"):
        wheel(folder, "cuda-bindings", major)
        wheel(folder, "cuda-python", major, f"cuda-bindings=={major}")
        wheel(folder, package, major)
    wheel(folder, "torch", "2.14.1", "cuda-bindings>=13.0.3,<14", "nvidia-cuda-nvrtc==13.0.3")
    wheel(folder, "torch", "2.10.0", "cuda-bindings==12.9.1", "nvidia-cuda-nvrtc-cu12==12.9.1")
    wheel(folder, "torch", "2.13.0+cpu")
    project = [r for r in map(Requirement, metadata_of_the_project()) if r.name not in ("torch", "cuda-python") and "cuda" not in r.name]
    for r in project:
        if r.marker is None:
            (least,) = (clause.version for clause in r.specifier)
            wheel(folder, r.name, str(Version(least)))
    wheel(folder, "ssmgen", "0.1.0", *metadata_of_the_project())

    def resolved(torch: str, extra: str) -> dict[str, str]:
        root = tmp_path_factory.mktemp("environment")
        venv.create(root, with_pip=False, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(root / "bin" / "python"), "install", "-q", "--no-index"]
        pip += ["--find-links", str(folder)]
        environment = {"PIP_CONFIG_FILE": "/dev/null", "PATH": "/usr/bin:/bin"}
        subprocess.run([*pip, f"torch=={torch}"], check=True, env=environment)
        report = root / "report.json"
        subprocess.run([*pip, "--dry-run", "--report", str(report), f"ssmgen{extra}"], check=True, env=environment)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
        return {item["name"]: item["version"] for item in found}

    return resolved


def metadata_of_the_project() -> list[str]:
    """Its Requires-Dist lines: of ssmgen itself, and of cu12 and cu13."""
    project = constraints.project()
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(f'{line}; extra == "{name}"' for name in ("cu12", "cu13") for line in extras[name])]


@costly(1)
@pytest.mark.parametrize(("torch", "cuda"), [("2.14.1", "13.0"), ("2.10.0", "12.8"), ("2.13.0+cpu", None)])
def test_the_install_line_keeps_the_torch_that_is_there(beside, torch, cuda):
    found = beside(torch, f"[{extra.extra_of(cuda)}]")
    assert found.keys() >= {"ssmgen", "cuda-python"} and "torch" not in found


@pytest.mark.matrix
def test_no_extra_is_needed_where_torch_brings_nvrtc(beside):
    found = beside("2.14.1", "")
    assert "torch" not in found and found["cuda-python"].startswith("13.") and not [name for name in found if "nvrtc" in name]


def test_the_wrong_extra_replaces_torch(beside):
    """The documentation warns of it: the reason for the install line."""
    assert beside("2.14.1", "[cu12]")["torch"] == "2.13.0+cpu"
