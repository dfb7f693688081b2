"""ssmgen.lock: for each default variant, its spec, a digest of its source, and its resources under each compiler that was used.

NVRTC 12 and 13 give different register counts, and a machine has one of them, so the lock has a build per major version. `ssmgen generate`
fills in the resources for the installed compiler. Resources for other compilers stay until the source changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..cache.files import read_json
from ..compile.nvrtc import Resources
from ..errors import SsmgenError, bullets

LOCK = "ssmgen.lock"
BUILD = re.compile(r"CL-\d+ V(\d+)\.\d+\.\d+")
PATH = re.compile(r"sm_\d+[af]?/\w+\.cu", re.ASCII)
RESOURCES = re.compile(r'"resources": \{[^{}]*(\{[^{}]*\}[^{}]*)*\}')  # of a variant: one line of a review
SHOWN = 8  # faults in a message


class LockError(SsmgenError):
    """A lock cannot be read."""

    def __init__(self, path: Path, problems: list[str]):
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        super().__init__(
            f"{path} is not a lock of generated files:\n{bullets(problems[:SHOWN] + more)}\n"
            "Restore it from version control; or remove it with the generated files beside it, and run: ssmgen generate"
        )
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Locked:
    """One variant. resources: by the compiler's major version. shown: whether its text is committed."""

    spec: str
    arch: str
    source_sha256: str
    resources: Mapping[str, Resources]
    shown: bool = False

    @property
    def header(self) -> str:
        """The first line of its file."""
        return f"// {self.spec.partition(':')[0]} for {self.arch}"


@dataclass(frozen=True, slots=True)
class Lock:
    """compilers: builds by major version. variants: by the path of their file."""

    compilers: Mapping[str, str]
    variants: Mapping[str, Locked]

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Raises FileNotFoundError, and LockError that lists all problems."""
        try:
            value = read_json(path)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise FileNotFoundError(path) from e
        except (OSError, ValueError) as e:
            raise LockError(path, [str(getattr(e, "strerror", None) or e)]) from e
        if problems := _faults(value):
            raise LockError(path, problems)
        return cls(value["compilers"], {name: _locked(row) for name, row in value["variants"].items()})

    def __str__(self) -> str:
        variants = {name: asdict(row) for name, row in self.variants.items()}
        return text_of({"compilers": self.compilers, "variants": variants})

    def unasked(self) -> dict[str, list[str]]:
        """{compiler: the variants without resources under it}, for compilers without resources for some variants."""
        return {
            build: names
            for major, build in self.compilers.items()
            if (names := [name for name, row in self.variants.items() if major not in row.resources])
        }


def text_of(lock: Mapping[str, Any]) -> str:
    """The file of a lock, given as JSON values."""
    text = json.dumps(lock, indent=1, sort_keys=True)
    return RESOURCES.sub(lambda found: re.sub(r"(?<=\{) | (?=\})", "", " ".join(found[0].split())), text) + "\n"


def major_of(build: str) -> str:
    """The major version in the name of a compiler's build. Raises ValueError for other texts."""
    if not (match := BUILD.fullmatch(build)):
        raise ValueError(f"{build!r} is not a build of NVRTC; expected one such as 'CL-36037853 V12.9.86'")
    return match[1]


def _locked(row: Mapping[str, Any]) -> Locked:
    resources = {major: Resources(**found) for major, found in row["resources"].items()}
    return Locked(row["spec"], row["arch"], row["source_sha256"], resources, row["shown"])


def _faults(value: Any) -> list[str]:
    if wrong := _unlike(value, {"compilers": dict, "variants": dict}, "it"):
        return wrong
    compilers = value["compilers"]
    for major, build in compilers.items():
        match = BUILD.fullmatch(build) if isinstance(build, str) else None
        if not match or match[1] != major:
            wrong.append(f"compilers: {build!r} is not a build of NVRTC {major!r}; expected one such as 'CL-36037853 V12.9.86'")
    for name, row in value["variants"].items():
        wrong += _faults_of_variant(name, row, compilers)
    return wrong


def _faults_of_variant(name: str, row: Any, compilers: Mapping[str, Any]) -> list[str]:
    if not PATH.fullmatch(name):
        return [f"variants: {name!r} is not a path; expected one such as 'sm_90a/name.cu'"]
    if wrong := _unlike(row, {"spec": str, "arch": str, "source_sha256": str, "resources": dict, "shown": bool}, name):
        return wrong
    for major, found in row["resources"].items():
        where = f"{name}: resources: {major!r}"
        wrong += [] if major in compilers else [f"{where} is of a compiler that the lock does not name"]
        if unlike := _unlike(found, {f.name: int for f in fields(Resources)}, where):
            wrong += unlike
        elif min(found.values()) < 0 or Resources(**found).spills:
            wrong.append(f"{where} has negative numbers or spills; expected neither")
    return wrong


def _unlike(value: Any, shape: Mapping[str, type], where: str) -> list[str]:
    """How a value is not an object with exactly these names, and values of these types: in words."""
    if not isinstance(value, dict):
        return [f"{where} is not an object with {', '.join(shape)}"]
    wrong = [f"{where}: {name} is missing" for name in shape if name not in value]
    wrong += [f"{where}: {name!r} is unknown; expected one of {', '.join(shape)}" for name in value if name not in shape]
    found = ((name, kind, value[name]) for name, kind in shape.items() if name in value)
    return wrong + [f"{where}: {name} has a wrong type; expected {kind.__name__}" for name, kind, given in found if type(given) is not kind]
