"""The documentation as tests see it: its pages and their blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NEEDS_A_GPU = "needs a GPU"  # a block's title; "needs …" of anything else is only compiled
_FENCE = re.compile(r"^```(?P<language>[a-z]+)(?: (?P<info>[^\n]*))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    info: str  # the text after the language, such as title="…"
    text: str
    line: int  # of the file, at which the text begins

    @property
    def title(self) -> str:
        found = re.search(r'title="([^"]*)"', self.info)
        return found[1] if found else ""


def pages() -> list[Path]:
    return sorted(DOCS.glob("**/*.md"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of a language, in order."""
    text = page.read_text()
    found = [Block(m["language"], m["info"] or "", m["text"], text.count("\n", 0, m.start("text")) + 1) for m in _FENCE.finditer(text)]
    return [b for b in found if b.language == language]


def with_examples() -> list[Path]:
    """Pages whose Python blocks without a file's name are one program, from top to bottom."""
    return [page for page in pages() if programs(page)]


def programs(page: Path) -> list[Block]:
    return [b for b in blocks(page, "python") if not b.title.endswith(".py")]


def run(page: Path, on_card: bool) -> dict[str, object]:
    """Runs a page's examples in order in one namespace and returns it. Examples that need a GPU run only if there is one."""
    names: dict[str, object] = {"__name__": "__docs__", "__file__": str(page)}
    for block in programs(page):
        padded = "\n" * (block.line - 1) + block.text  # so that a traceback names the page's own line
        code = compile(padded, str(page), "exec")
        if not block.title.startswith("needs ") or (on_card and block.title == NEEDS_A_GPU):
            exec(code, names)
    return names
