"""Puts the scaffold's files into docs/guides/new_family.md, where the guide shows them: `python -m tools.guide`.

Each block of code with a file's name as its title is that file of tools/new_family/files/. A test holds them equal.
"""

from __future__ import annotations

import re
from pathlib import Path

from tools.new_family.scaffold import FILES

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "new_family.md"
BLOCK = re.compile(r'^(```\w+ title="([^"]+)"\n).*?^```$', re.MULTILINE | re.DOTALL)


def filled(text: str) -> str:
    """The guide with the files as they are. Raises FileNotFoundError for a block of none."""
    return BLOCK.sub(lambda found: f"{found[1]}{(FILES / found[2]).read_text()}```", text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
