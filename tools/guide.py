"""Puts into docs/ what is shown there and said elsewhere: `python -m tools.guide`. Tests hold them equal.

Each block of code of docs/guides/new_family.md with a file's name as its title is that file of tools/new_family/files/. Each table between
`<!-- operands of FAMILY -->`, or `<!-- operands of FAMILY, FUNCTION -->`, and `<!-- end -->` is made from the family's table of operands.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import ssmgen
from ssmgen.spec.operands import Table
from tools.new_family.scaffold import FILES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "guides" / "new_family.md"
BLOCK = re.compile(r'^(```\w+ title="([^"]+)"\n).*?^```$', re.MULTILINE | re.DOTALL)
OPERANDS = re.compile(r"^(<!-- operands of (?P<family>\w+)(?:, (?P<function>\w+))? -->\n).*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


def filled(text: str) -> str:
    """The guide with the files as they are. Raises FileNotFoundError for a block of none."""
    return BLOCK.sub(lambda found: f"{found[1]}{(FILES / found[2]).read_text()}```", text)


def table_of(family: str, function: str | None) -> Table:
    """A family's table of operands, or one of its functions'."""
    module = importlib.import_module(f"ssmgen.families.{family}.operands")
    found: Table = module.FUNCTIONS[function] if function else module.OPERANDS
    return found


def given(function: str) -> list[str]:
    """The arguments of a public function that have no default; none if there is no function of this name, but several of its family."""
    if function not in ssmgen.__all__:
        return []
    parameters = inspect.signature(getattr(ssmgen, function)).parameters.values()
    return [each.name for each in parameters if each.default is inspect.Parameter.empty]


def with_operands(text: str) -> str:
    """A page with its tables of operands as families have them."""

    def filled_in(m: re.Match[str]) -> str:
        table = table_of(m["family"], m["function"]).page(given(m["function"] or m["family"]))
        return f"{m[1]}\n{in_parts(table)}\n\n<!-- end -->"

    return OPERANDS.sub(filled_in, text)


def in_parts(table: str, most: int = 24) -> str:
    """A long table as two, the second with the optional operands."""
    head, ruler, *rows = table.splitlines()
    if len(rows) <= most:
        return table
    optional = [row for row in rows if "may be left out" in row or "may be None" in row]
    needed = [row for row in rows if row not in optional]
    parts = [needed, *(optional[i : i + most] for i in range(0, len(optional), most))]
    return "\n\nOptional:\n\n".join("\n".join([head, ruler, *part]) for part in parts)


def pages() -> list[Path]:
    return sorted((DOCS / "operators").glob("*.md"))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    for page in pages():
        page.write_text(with_operands(page.read_text()))
