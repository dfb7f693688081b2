"""ssmgen.lock: for each default variant, its spec, a digest of its source, and its resources under each compiler that was used.

NVRTC 12 and 13 give different register counts, and a machine has one of them, so the lock has a build per major version. `ssmgen generate`
fills in the resources for the installed compiler. Resources for other compilers stay until the source changes.

A variant has two lines: its path with everything that a compiler or a template can change, then its spec. Its architecture is in the path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cache.files import read_json
from ..compile.nvrtc import Resources
from ..errors import SsmgenError, bullets

LOCK = "ssmgen.lock"
BUILD = re.compile(r"CL-\d+ V(\d+)\.\d+\.\d+")
PATH = re.compile(r"sm_\d+[af]?/\w+\.cu", re.ASCII)
FOLDED = re.compile(r'\n {4,}|\n {3}(?!"spec")|\n {2}(?=\})')  # the breaks of indented JSON that a lock leaves out
RECORDED = ("registers", "shared", "stack")  # of Resources: a variant that spills is refused
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
    source_sha256: str
    resources: Mapping[str, Resources]
    shown: bool = False

    def header(self, path: str) -> str:
        """The first line of its file."""
        return f"// {self.spec.partition(':')[0]} for {path.partition('/')[0]}"

    def row(self) -> dict[str, Any]:
        """Its JSON value. "shown" is there only if it is true."""
        resources = {major: {name: getattr(found, name) for name in RECORDED} for major, found in self.resources.items()}
        return {"spec": self.spec, "source_sha256": self.source_sha256, "resources": resources} | ({"shown": True} if self.shown else {})


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
        return text_of({"compilers": self.compilers, "variants": {name: locked.row() for name, locked in self.variants.items()}})

    def unasked(self) -> dict[str, list[str]]:
        """{compiler: the variants without resources under it}, for compilers without resources for some variants."""
        return {
            build: names
            for major, build in self.compilers.items()
            if (names := [name for name, row in self.variants.items() if major not in row.resources])
        }


def text_of(lock: Mapping[str, Any]) -> str:
    """The file of a lock, given as JSON values."""
    text = json.dumps(lock, indent=1, sort_keys=True) + "\n"
    return FOLDED.sub(lambda found: " " * (text[found.start() - 1] == ","), text)


def major_of(build: str) -> str:
    """The major version in the name of a compiler's build. Raises ValueError for other texts."""
    if not (match := BUILD.fullmatch(build)):
        raise ValueError(f"{build!r} is not a build of NVRTC; expected one such as 'CL-36037853 V12.9.86'")
    return match[1]


def _locked(row: Mapping[str, Any]) -> Locked:
    resources = {major: Resources(spill_stores=0, spill_loads=0, **found) for major, found in row["resources"].items()}
    return Locked(row["spec"], row["source_sha256"], resources, row.get("shown", False))


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
    if wrong := _unlike(row, {"spec": str, "source_sha256": str, "resources": dict}, name, {"shown": bool}):
        return wrong
    for major, found in row["resources"].items():
        where = f"{name}: resources: {major!r}"
        wrong += [] if major in compilers else [f"{where} is of a compiler that the lock does not name"]
        if unlike := _unlike(found, dict.fromkeys(RECORDED, int), where):
            wrong += unlike
        elif min(found.values()) < 0:
            wrong.append(f"{where} has negative numbers")
    return wrong


def _unlike(value: Any, shape: Mapping[str, type], where: str, more: Mapping[str, type] | None = None) -> list[str]:
    """How a value is not an object with these names, and values of these types: in words. more: names that it may have or lack."""
    if not isinstance(value, dict):
        return [f"{where} is not an object with {', '.join(shape)}"]
    kinds = {**shape, **(more or {})}
    wrong = [f"{where}: {name} is missing" for name in shape if name not in value]
    wrong += [f"{where}: {name!r} is unknown; expected one of {', '.join(kinds)}" for name in value if name not in kinds]
    found = ((name, kind, value[name]) for name, kind in kinds.items() if name in value)
    return wrong + [f"{where}: {name} has a wrong type; expected {kind.__name__}" for name, kind, given in found if type(given) is not kind]
