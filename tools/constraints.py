"""`python -m tools.constraints`: writes this environment's versions into the constraints file of its Python.

Run it after the tests passed. `pip install -c` then installs the same versions. The file names all direct and indirect requirements of
ssmgen and its extras `test` and `docs`, except CUDA packages and Triton: each build of torch pins these.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib as tomli
else:
    import tomli

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "constraints"
EXTRAS = ("test", "docs")
OF_TORCH = re.compile(r"cuda-|nvidia-(?!cuda-nvdisasm$)|triton$")  # no build of torch requires nvdisasm
HEAD = "# Pinned versions of all packages that the tests need; `python -m tools.constraints` writes this file.\n"


class ConstraintsError(Exception):
    """pip could not say which releases there are."""


def path_of(python: tuple[int, int]) -> Path:
    """Named like the folder in `.venv/lib`, so that a shell finds it without starting Python."""
    return FOLDER / f"python{python[0]}.{python[1]}.txt"


def here() -> Path:
    return path_of((sys.version_info.major, sys.version_info.minor))


def pinned(path: Path) -> dict[str, str]:
    """{canonical name: version} of a constraints file."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def needed(name: str = "ssmgen", extras: tuple[str, ...] = EXTRAS) -> dict[str, str]:
    """{canonical name: public version} of an installed distribution and its requirements at all levels, without OF_TORCH.

    Raises PackageNotFoundError if something is missing.
    """
    found: dict[str, str] = {}
    asked, left = set(), [(name, extras)]
    while left:
        name, extras = left.pop()
        if OF_TORCH.match(name) or (name, extras) in asked:
            continue
        asked.add((name, extras))
        distribution = metadata.distribution(name)
        found[canonicalize_name(name)] = Version(distribution.version).public
        left += _required(distribution, extras)
    return {name: version for name, version in sorted(found.items()) if name != "ssmgen"}


def _required(distribution: metadata.Distribution, extras: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), tuple(sorted(requirement.extras))


def project() -> dict[str, Any]:
    """The table of that name in pyproject.toml."""
    table: dict[str, Any] = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def named(extras: tuple[str, ...] = EXTRAS) -> list[Requirement]:
    """The requirements of ssmgen and of these extras in pyproject.toml, for this Python, without OF_TORCH."""
    found = project()
    lines = [*found["dependencies"], *(line for extra in extras for line in found["optional-dependencies"][extra])]
    requirements = map(Requirement, lines)
    return [r for r in requirements if not OF_TORCH.match(r.name) and (r.marker is None or r.marker.evaluate({"extra": ""}))]


def newer() -> dict[str, str]:
    """{canonical name: version} of the packages of named() whose newest release is not the installed one; torch is not asked for.

    Reads one page of the index for each, and installs nothing. Raises ConstraintsError.
    """
    asked = [f"{r.name}{r.specifier}" for r in named() if r.name != "torch"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--upgrade", "--report", str(report)]
        done = subprocess.run([*command, *asked], capture_output=True, text=True)
        if done.returncode:
            raise ConstraintsError(done.stderr.strip()[-2000:])
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {canonicalize_name(item["name"]): Version(item["version"]).public for item in found}


def written(versions: Mapping[str, str]) -> str:
    return HEAD + "".join(f"{name}=={version}\n" for name, version in versions.items())


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    versions = needed()
    here().write_text(written(versions))
    print(f"{here().relative_to(ROOT)} has {len(versions)} versions")


if __name__ == "__main__":
    main()
