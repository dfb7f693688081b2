"""Whether a release of vLLM or SGLang has the signatures that the plugins were written against: `python -m tools.engines`.

Without arguments, it compares the releases that the plugins name. `python -m tools.engines --newest` compares the newest ones, and
`python -m tools.engines vllm==0.34.0` a given one; a wheel, a source distribution or a folder with the package can also be named. It fails
and names every function that has drifted. pip downloads a wheel without dependencies; only its Python files are read. A function that an
engine imports from a package of DISTRIBUTIONS is compared in the version of it that the engine requires, which pip downloads, too.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ssmgen.compat.shared.replacing import differences

from .engine_source import Elsewhere, Missing, Source, required

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {"sgl_kernel": "sglang-kernel"}  # packages that engines import replaced functions from -> who publishes them
PYTHONS = ("", "3.12", "3.13", "3.11", "3.10")  # wheels that hold compiled code fit some of them only; "": this one


class DownloadError(Exception):
    """pip found no wheel."""


def recorded() -> Any:
    """tests/support/engine_signatures.py, as a module: VERSIONS and SIGNATURES."""
    support = str(ROOT / "tests" / "support")
    if support not in sys.path:
        sys.path.append(support)  # it imports another module of that folder
    return importlib.import_module("engine_signatures")


def function_of(parameters: str) -> Callable[..., Any]:
    """A function of recorded parameters."""
    made: dict[str, Any] = {}
    exec(f"def function({parameters}): pass", made)
    function: Callable[..., Any] = made["function"]
    return function


def downloaded(requirement: str, folder: Path) -> Path:
    """The wheel of `vllm==0.33.0`, or of `vllm` in its newest release, in folder. Raises DownloadError."""
    said = ""
    for python in PYTHONS:
        fits = ["--python-version", python] if python else []
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *fits, "-d", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if not done.returncode:
            (wheel,) = folder.iterdir()
            return wheel
        said = done.stderr.strip() or said
    raise DownloadError(f"pip has no wheel of {requirement}:\n{said}")


def compared(
    source: Source, signatures: Mapping[tuple[str, str], str], other: Callable[[str], Source | None] = lambda package: None
) -> tuple[dict[str, str], dict[str, str]]:
    """({place: how it has drifted}, {place: why it cannot be compared}) of the places of one engine. other: of a package's name, its files
    in the version that the engine requires, if they are known."""
    drifted, elsewhere = {}, {}
    for (module, name), parameters in signatures.items():
        place = f"{module}.{name}"
        try:
            found = signatures_of(source, module, name, other)
            said = [differences(function_of(parameters), each) for each in found]
        except Elsewhere as e:
            elsewhere[place] = str(e)
        except Missing as e:
            drifted[place] = str(e)
        else:
            if all(said):  # a condition may choose one of several definitions
                drifted[place] = "; ".join(said[-1])
    return drifted, elsewhere


def signatures_of(source: Source, module: str, name: str, other: Callable[[str], Source | None]) -> list[Callable[..., Any]]:
    """Stand-ins with the function's parameters. Raises Missing, or Elsewhere if another package's files are not known."""
    try:
        return source.signatures(module, name)
    except Elsewhere as e:
        files = other(e.package)
        if files is None:
            raise
        return files.signatures(e.whence, e.name)


def others(path: Path, folder: Path) -> Callable[[str], Source | None]:
    """The packages beside an engine: of the same folder, or in the versions that a wheel requires, downloaded to folder."""

    @cache
    def files(package: str) -> Source | None:
        if path.is_dir():
            return Source(path) if (path / package).is_dir() else None
        distribution = DISTRIBUTIONS.get(package)
        needed = None if distribution is None else required(path, distribution)
        if needed is None:
            return None
        (folder / package).mkdir()
        return Source(downloaded(needed, folder / package))

    return files


def report(package: str, path: Path, signatures: Mapping[tuple[str, str], str]) -> bool:
    """Prints how one release compares. Returns whether nothing has drifted."""
    own = {place: text for place, text in signatures.items() if place[0].partition(".")[0] == package}
    with tempfile.TemporaryDirectory() as folder:
        drifted, elsewhere = compared(Source(path), own, others(path, Path(folder)))
    equal = len(own) - len(drifted) - len(elsewhere)
    print(f"{path.name}: {equal} of {len(own)} signatures are the recorded ones", flush=True)
    for place, why in elsewhere.items():
        print(f"  not compared: {place}: {why}")
    for place, why in drifted.items():
        print(f"  drifted: {place}: {why}")
    return not drifted


def run(wanted: Sequence[str], newest: bool = False) -> bool:
    """Compares releases, of both engines if none is named. Returns whether nothing has drifted. Raises DownloadError."""
    known = recorded()
    fine = True
    for named in wanted or known.VERSIONS:
        path, package = Path(named), named.partition("==")[0]
        if path.exists():
            package = path.name.partition("-")[0] if path.is_file() else next(p for p in known.VERSIONS if (path / p).is_dir())
            fine &= report(package, path, known.SIGNATURES)
            continue
        if package not in known.VERSIONS:
            raise SystemExit(f"{named} is neither a file nor one of {', '.join(known.VERSIONS)}, with ==RELEASE or without")
        pinned = named if "==" in named or newest else f"{package}=={known.VERSIONS[package]}"
        with tempfile.TemporaryDirectory() as folder:
            fine &= report(package, downloaded(pinned, Path(folder)), known.SIGNATURES)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.engines", description=__doc__)
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="vllm, vllm==0.33.0, or a path. Default: both engines")
    parser.add_argument("--newest", action="store_true", help="the newest release of an engine that is named without one")
    given = parser.parse_args()
    if not run(given.releases, given.newest):
        raise SystemExit("signatures have drifted: ssmgen leaves these functions to the engine")


if __name__ == "__main__":
    main()
