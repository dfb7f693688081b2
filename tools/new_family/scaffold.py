"""The parts of a new family: `files/`, where it is called token_shift, and lines for existing files."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import ssmgen

FILES = Path(__file__).parent / "files"
NAME, CLASS = "token_shift", "TokenShift"  # the family's name in those files, and as their classes have it


class ScaffoldError(Exception):
    """A family cannot be added. problems: all reasons, in words."""

    def __init__(self, name: str, problems: list[str]):
        super().__init__("\n".join([f"{name} cannot be added:", *(f"  - {problem}" for problem in problems), "Nothing was written."]))
        self.problems = problems


class Lines(NamedTuple):
    """Lines for a file, inserted before the first match of a pattern."""

    path: str
    text: str
    ahead_of: str


EXTENDED = (
    Lines("ssmgen/__init__.pyi", "from .families.token_shift.call import token_shift as token_shift\n", r"^from \.select\.registry "),
    Lines("mkdocs.yml", "      - token_shift: operators/token_shift.md\n", r"^  - Coming from:$"),
    Lines(
        "docs/operators/index.md",
        "| [token_shift](token_shift.md) | `token_shift` | one for state, x, out; mix independent | no | no |\n",
        r"^\nAxes are ",
    ),
    Lines("docs/reference/api.md", "## token_shift\n\n::: ssmgen.families.token_shift.call.token_shift\n\n", r"^## Around a call$"),
    Lines("CHANGELOG.md", "- A family of kernels: `token_shift`.\n", r"(?<=^## Unreleased\n\n### Added\n)"),
)


def write(root: Path, name: str) -> tuple[list[str], list[str]]:
    """Adds a family to the checkout at `root`: (paths written, paths extended).

    Raises ScaffoldError, before anything is written, for a name that is invalid or taken, or if a file has no place for its lines.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ScaffoldError(name, ["its name is no Python name in lower case, with single underscores, such as token_shift"])
    written = {
        _named(str(path.relative_to(FILES)), name): _named(path.read_text(), name) for path in sorted(FILES.rglob("*.*")) if path.is_file()
    }
    extended = {lines.path: _with(root, lines, name) for lines in EXTENDED}
    problems = [f"ssmgen.{name} is a public function"] if name in ssmgen.__all__ else []
    problems += [f"ssmgen has a module {name}"] if find_spec(f"ssmgen.{name}") else []
    problems += [f"{path} is there" for path in written if (root / path).exists()]
    problems += [f"{lines.path} has no line that matches {lines.ahead_of!r}" for lines in EXTENDED if extended[lines.path] is None]
    if problems:
        raise ScaffoldError(name, problems)
    for path, text in {**written, **extended}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return [*written], [*extended]


def _named(text: str, name: str) -> str:
    return text.replace(NAME, name).replace(CLASS, "".join(part.capitalize() for part in name.split("_")))


def _with(root: Path, lines: Lines, name: str) -> str | None:
    """The file's text with the new lines; None if the pattern does not match."""
    text = (root / lines.path).read_text()
    place = re.search(lines.ahead_of, text, re.MULTILINE)
    return place and text[: place.start()] + _named(lines.text, name) + text[place.start() :]
