"""Docstrings for the API pages: their lines `name: shape, meaning` as lists, everything else as paragraphs."""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"\w+(, \w+)*: .+")
COLUMNS = re.compile(r"\s{3,}")  # between two entries on one line
HEADING = re.compile(r"[A-Z][^.:]*:")  # a paragraph alone, before rare arguments
OPENERS = ("Returns ", "Raises ", "Source: ", "Notation: ")  # each begins a new paragraph


def markdown(docstring: str) -> str:
    """Reads entries (`name, name: …`, continued on indented lines; three spaces separate two on one line), items (`- …`) and paragraphs."""
    blocks: list[list[str]] = []  # [kind, text]
    for line in docstring.splitlines():
        if not line.strip():
            blocks.append(["gap", ""])
        elif line.startswith(" ") and blocks and blocks[-1][0] != "gap" and not COLUMNS.search(line.strip()):
            blocks[-1][1] += " " + line.strip()
        else:
            for part in COLUMNS.split(line.strip()):
                _add(blocks, part)
    return "\n\n".join(_text(kind, text) for kind, text in blocks if kind != "gap")


def _add(blocks: list[list[str]], part: str) -> None:
    if part.startswith("- "):
        blocks.append(["item", part[2:]])
    elif not part.startswith(OPENERS) and ENTRY.fullmatch(part):
        blocks.append(["entry", part])
    elif blocks and blocks[-1][0] == "text" and not part.startswith(OPENERS):
        blocks[-1][1] += " " + part
    else:
        blocks.append(["text", part])


def _text(kind: str, text: str) -> str:
    if kind == "entry":
        names, _, rest = text.partition(": ")
        return f"- `{names}`: {_escaped(rest)}"
    if HEADING.fullmatch(text):
        return f"**{_escaped(text[:-1])}**"
    return f"- {_escaped(text)}" if kind == "item" else _escaped(text)


def _escaped(text: str) -> str:
    """The text unchanged, with code in backticks."""
    parts = text.split("`")
    return "`".join(re.sub(r"([\\*_\[\]#])", r"\\\1", part).replace("<", "&lt;") if i % 2 == 0 else part for i, part in enumerate(parts))


class Docstrings(griffe.Extension):
    """Rewrites every docstring of the package as it is collected."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
